"""`paged bench step`: the parts of a decode step of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from paged.base.words import counted
from paged.cli.commands import with_options_of
from paged.cli.models import ModelOptions
from paged.cli.options import Json
from paged.cli.show import figures, print_json, table
from paged.study.bench.workloads import Measured

if TYPE_CHECKING:
    from paged.study.bench.step import StepParts


@with_options_of(ModelOptions)
def step(
    named: ModelOptions,
    rows: Annotated[int, Option(min=1, help="Decoding sequences.")] = 64,
    context: Annotated[int, Option(min=1, help="Prompt tokens of each sequence.")] = 256,
    block_size: Annotated[int, Option(min=1, help="Tokens a block.")] = 16,
    steps: Annotated[int, Option(min=1, help="Steps to time.")] = 64,
    json: Json = False,
) -> None:  # fmt: skip
    """Time the parts of a step in which every sequence decodes a token: the host's, and the forward pass.

    Figures are medians over the engine's own steps. A model that runs as one call into C runs the last step again, with and without attention,
    and its products alone; their shares divide the forward pass.

    Example: `paged bench step --rows 64 --context 512`
    """
    loaded = named.loaded("bench")
    from paged.study.bench.step import step_parts

    found = step_parts(
        loaded,
        name=named.name,
        rows=rows,
        context=context,
        steps=steps,
        block_size=block_size,
        **named.engine_options,
    )
    if json:
        print_json(found)
    else:
        _show(found)


def _show(found: StepParts) -> None:
    total = found.step_us.median
    parts: list[tuple[str, Measured | float | None]] = [
        ("schedule", found.schedule_us),
        ("inputs", found.inputs_us),
        ("forward pass", found.forward_us),
        ("  attention", found.attention_us),
        ("  products", found.products_us),
        ("  the rest", found.rest_us),
        ("sampling", found.sampling_us),
        ("update", found.update_us),
        ("outputs", found.outputs_us),
        ("a step", found.step_us),
    ]
    shown = [_cells(name, value, total) for name, value in parts if value is not None]
    table("a decode step", ["part", "µs", "fastest", "slowest", "of a step"], shown, right=range(1, 5))
    mode = "batch-invariant" if found.batch_invariant else "fast"
    pairs = [
        ("the host's share", f"{found.host_share:.1%}: all but the forward pass"),
        ("rows", f"{found.rows:,}, prompts of {found.context:,} tokens, {counted(found.steps, 'step')}"),
        ("model", f"{found.model}, {found.dtype}, {found.backend}, {mode}, on {counted(found.threads, 'thread')}"),
    ]
    if found.attention_us is not None:
        pairs.append(("within the forward pass", "shares of the last step's pass, made again outside any step"))
    figures("what was timed", pairs)


def _cells(name: str, value: Measured | float, total: float) -> list[str]:
    if isinstance(value, Measured):
        median, ends = value.median, [f"{value.least:,.1f}", f"{value.most:,.1f}"]
    else:
        median, ends = value, ["", ""]
    return [name, f"{median:,.1f}", *ends, f"{median / total:.1%}"]
