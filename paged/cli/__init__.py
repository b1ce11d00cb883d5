"""The command line, `paged`. Knows what people type and read. Every figure it shows comes from `paged.simulator` or `paged.bench`."""

import io
import sys

from paged.siblings import ShadowedPackage, check_siblings

__all__ = ["main"]


def main() -> None:
    """The entry point of the `paged` script. Exits with its status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show µ or █ gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    try:
        check_siblings()
    except ShadowedPackage as problem:
        print(f"paged: {problem}", file=sys.stderr)
        sys.exit(2)
    # Only now: the commands import the siblings, and somebody else's must not be run.
    from paged.cli.app import run

    sys.exit(run())
