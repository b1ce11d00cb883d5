"""The command line, `paged`. Knows what people type and read. Every figure it shows comes from `paged.simulator` or `paged.bench`.

It needs the extra `cli`, and says so in one line where that is not installed.
"""

import io
import sys

from paged.extras import MissingExtra, import_with_extra
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
        # Only now: the commands import the siblings, and somebody else's must not be run.
        app = import_with_extra("paged.cli.app", "cli")
    except (MissingExtra, ShadowedPackage) as problem:
        print(f"paged: {problem}", file=sys.stderr)
        sys.exit(2)
    sys.exit(app.run())
