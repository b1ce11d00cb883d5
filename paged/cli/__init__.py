"""The command line, `paged`. It needs the extra `cli`, and says so in one line if that is not installed."""

import io
import os
import sys

from paged.base.extras import import_with_extra
from paged.cli import signals
from paged.errors import MissingExtra

__all__ = ["SET_FOR_ITSELF", "main"]

SET_FOR_ITSELF: dict[str, str] = {}
"""Environment variables that the command line has set."""
# A waiting thread of torch looks so many times for work before it sleeps. By default it looks for milliseconds, which it takes from other
# threads. A hundredth of that costs nothing on an idle machine. A library reads it when it is loaded.
_SPINS = {"GOMP_SPINCOUNT": "2000"}


def main() -> None:
    """Run the `paged` script, and exit with its status."""
    signals.end_at_once()
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        SET_FOR_ITSELF.update(_SPINS)
        os.environ.update(_SPINS)
    _have_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show µ or █ gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    try:
        app = import_with_extra("paged.cli.app", "cli")
    except MissingExtra as problem:
        print(f"paged: {problem}", file=sys.stderr)
        sys.exit(2)
    signals.interrupt()
    signals.leave(app.run())


def _have_streams() -> None:
    """Open standard streams that are closed: else the next file gets their number, and they are None in Python."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(file, "r" if name == "stdin" else "w", closefd=False))
            if number == 1:
                print("paged: standard output is closed", file=sys.stderr)
                sys.exit(2)
