"""Every family of decoders that transformers has: accepted and equal to `generate`, or refused by name. `make architectures`.

A family is a row of architectures.toml; one_architecture.py says what is tried. Each is tried in a process of its own. Ends with 1 if any that is
accepted answers wrongly, or was not tried as it should be.

    python -m conformance.architectures                                    # all of them
    python -m conformance.architectures --only llama --only "falcon alibi"
    python -m conformance.architectures --out benchmarks/results/architectures
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from conformance.one_architecture import BOUND, LENGTHS, MAX_TOKENS, ROUNDS, Verdict, families
from paged.model.machine import machine

ROOT = Path(__file__).resolve().parents[1]
app = typer.Typer(add_completion=False)
COLUMNS = ("family", "outcome", "layers", "logits off", "preempted", "why")
_KINDS = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "indexed_attention": "indexed",
    "minimax_m3_sparse": "indexed",
    "linear_attention": "state",
    "hybrid": "full and state",
    "hybrid_sliding": "window and state",
}


def tried(name: str, device: str = "cpu") -> Verdict:
    """The verdict of a family, from a process of its own; one that ends in another way is wrong."""
    command = [sys.executable, "-m", "conformance.one_architecture", name, device]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode == 0:
        return msgspec.json.decode(ended.stdout, type=Verdict)
    last = ended.stderr.strip().splitlines()[-1:] or [""]
    return Verdict(name=name, outcome="wrong", why=f"its process ended with status {ended.returncode}: {last[0]}")


def row(verdict: Verdict) -> tuple[str, ...]:
    """Its cells, as COLUMNS names them."""
    layers = " + ".join(f"{count} {_KINDS.get(kind, kind)}" for kind, count in verdict.layers.items())
    why = [verdict.why, verdict.note, *(f"without {name}: {said}" for name, said in verdict.left_out.items())]
    ran = verdict.outcome in ("equal", "wrong")
    return (
        verdict.name,
        verdict.outcome,
        layers,
        f"{verdict.off:.0e}" if ran else "",
        f"{verdict.preempted} of {len(LENGTHS)}" if ran else "",
        " ".join(filter(None, why)),
    )


def summary(verdicts: list[Verdict]) -> str:
    """How many had each outcome."""
    counts = Counter(each.outcome for each in verdicts)
    return (
        f"{len(verdicts)} rows: {counts['equal']} accepted and equal to `generate`, {counts['wrong']} accepted and wrong, "
        f"{counts['refused']} refused by name, {counts['no model']} that transformers itself cannot run."
    )


def page(verdicts: list[Verdict], command: str) -> str:
    """The verdicts as Markdown."""
    its = machine()
    versions = ", ".join(f"{name} {its[name]}" for name in ("transformers", "torch"))
    lines = [
        "# Architectures",
        "",
        f"{summary(verdicts)} Python {its['python']}, {versions}; {its['processor']}, {its['cores']} cores.",
        "",
        "```",
        command,
        "```",
        "",
        "Small models of random weights, float32, each with all kinds of layers of its family; the rows are those of",
        "[architectures.toml](../../conformance/architectures.toml), which also says what is left out. Equal: the tokens of",
        f"prompts of {', '.join(map(str, LENGTHS))} tokens and {MAX_TOKENS} outputs each are those of `generate`, greedily; and in the smallest pool",
        "that one of them fits into, all at once and in chunks, tokens and logits are those of the request alone, to the last",
        f"bit, in {len(ROUNDS)} rounds: {', '.join(ROUNDS)}. `logits off` is the largest difference to the logits of `generate`, of the",
        "largest of them; `preempted` counts the requests that were preempted in some round. All at once without the batch-invariant mode, tokens",
        f"are the same, and logits within {BOUND:.0e} of the largest.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|---|---|--:|--:|---|",
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row(each)) + " |" for each in verdicts]
    return "\n".join([*lines, ""])


def chosen(only: list[str]) -> Iterator[str]:
    """Names of rows: those that are asked for, by their own or by a model_type; all if none is. Raises BadParameter."""
    known = families()
    for name in only:
        if not (found := [each for each, family in known.items() if name in (each, family.model_type)]):
            raise typer.BadParameter(f'no row "{name}"; --list shows them.')
        yield from found
    if not only:
        yield from known


@app.command()
def main(
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A row, or a model_type; may be repeated.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Only list the rows.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Families that are tried at once.")] = os.cpu_count() or 1,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda, where under pressure tokens have to be equal and logits up to rounding.")
    ] = "cpu",
    out: Annotated[Path | None, typer.Option(metavar="NAME", help="Write the table as NAME.md.")] = None,
) -> None:
    """Try small models of every family of decoders against transformers' `generate`, with ample memory and with too little."""
    # Not a terminal: as wide as the longest sentence, since a log is not cut.
    console = Console(width=None if sys.stdout.isatty() else 200)
    names = list(chosen(only or []))
    if list_only:
        console.print("\n".join(names), markup=False, highlight=False)
        return
    verdicts = []
    with ThreadPoolExecutor(jobs) as pool, Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"{len(names)} families", total=len(names))
        for verdict in pool.map(tried, names, [device] * len(names)):
            verdicts.append(verdict)
            progress.update(bar, advance=1, description=verdict.name)
    shown = Table(*COLUMNS, title="Architectures")
    for verdict in verdicts:
        shown.add_row(*row(verdict), style="red" if verdict.outcome == "wrong" else None)
    console.print(shown, markup=False)
    console.print(summary(verdicts), highlight=False)
    if out is not None:
        command = " ".join(["python -m conformance.architectures", *sys.argv[1:]])
        out.with_suffix(".md").write_text(page(verdicts, command), encoding="utf-8")
    if any(each.outcome == "wrong" for each in verdicts):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
