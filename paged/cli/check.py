"""`paged check`: run saved failures of the test kit again."""

from pathlib import Path
from typing import Annotated

import typer

from paged.cli.commands import group_of
from paged.cli.options import Json
from paged.cli.show import print_json, printed

STILL_FAILS = 1


def replay(
    file: Annotated[Path, typer.Argument(help="A program that the kit saved, or `save` of paged.testing.")],
    build: Annotated[str | None, typer.Option(metavar="MODULE:NAME", help="The function that builds the subject from a world; modules of the current folder are found.", show_default="what the file names, or paged's own")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Run a saved failure from the start, with every oracle, and show what it violates now.

    Status 1 if it violates something, else 0. The state machines and the soak save failures in the folder that PAGED_FAILURES in the
    environment names.

    Example: `PAGED_FAILURES=failures make campaign; paged check replay failures/manager-1f0c3a77.json`
    """
    from paged.testing.saved import imported, load, rerun

    saved = load(file)
    violation = rerun(saved, imported(build))
    if json:
        program = saved.program if violation is None else violation.program
        print_json(
            {
                "file": str(file),
                "found_then": saved.found,
                "found_now": [] if violation is None else violation.found,
                "program": program.lines,
            }
        )
    elif violation is None:
        printed(f"{file}: {len(saved.calls)} calls, nothing violated any more. Then it was:")
        for sentence in saved.found:
            printed(f"  {sentence}")
    else:
        printed(str(violation))
    if violation is not None:
        raise typer.Exit(STILL_FAILS)


check = group_of("Run saved failures of the test kit again.", replay)
