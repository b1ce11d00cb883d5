"""`paged bench scheduler`: the time of the scheduler on this machine, without a model."""

from functools import partial
from typing import Annotated, Literal

import typer

from paged.cli.options import Json, count, listed
from paged.cli.show import all_of, print_json, table
from paged.study.bench import DecodeStep, decode_step

_CACHING = {"off": [False], "on": [True], "both": [False, True]}


def scheduler(
    rows: Annotated[str, typer.Option(help="Decoding sequences, one number or several with commas.")] = "64,256,1024,4096",
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens of each sequence.")] = 256,
    holes: Annotated[int, typer.Option(min=0, help="Sequences that are aborted before timing, for free rows among the live ones.")] = 0,
    caching: Annotated[Literal["on", "off", "both"], typer.Option(help="Prefix caching.")] = "both",
    steps: Annotated[int | None, typer.Option(min=16, help="Steps to time.", show_default="2^18 / rows, 160 to 2048")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Time one decode step of the scheduler: schedule and update, in CPU time, with no model behind it.

    All sequences decode one token a step. The figure is the median over windows of 16 steps of the mean step, because sequences that started
    together need a new block once in 16 steps. Making the sampled tokens is the model's part and not timed.

    Example: `paged bench scheduler --rows 1024 --holes 16 --caching on`
    """
    cases = [(num, is_on) for num in listed(rows, "--rows", count) for is_on in _CACHING[caching]]
    measured = (decode_step(num, caching=is_on, context=context, holes=holes, steps=steps) for num, is_on in cases)
    show = partial(_show, context=context, holes=holes, json=json)
    show(all_of(measured, len(cases), "measurement", show))


def _show(results: list[DecodeStep], context: int, holes: int, json: bool) -> None:
    if json:
        print_json(results)
    else:
        title = f"a decode step, µs of CPU time; prompts of {context:,} tokens, {holes} holes"
        columns = ["rows", "caching", "µs a step", "fastest window", "slowest window", "schedule", "update", "µs a row"]
        table(title, columns, [_cells(result) for result in results], right=(0, 2, 3, 4, 5, 6, 7))


def _cells(result: DecodeStep) -> list[str]:
    micros = [result.us_per_step, result.us_min, result.us_max, result.us_schedule, result.us_update]
    return [
        f"{result.rows:,}",
        "on" if result.caching else "off",
        *(f"{value:,.1f}" for value in micros),
        f"{result.us_per_row:.3f}",
    ]
