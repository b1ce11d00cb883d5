"""`paged validate`: a recorded run, or a table of measured closed loops, held against its simulation."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from typer import Argument, Option

from paged.cli.commands import made_of
from paged.cli.options import Json, KvDtype, LinkGbps, LinkUs, Quantization, QuantizeHead, check_outputs
from paged.cli.show import print_json, printed, table
from paged.errors import InvalidConfig
from paged.study.hardware import device_names, model_names
from paged.study.report import validation_rows, write_validation_html
from paged.study.simulator import Cell, RunOptions, by_engine, closed_loops, engine_names, read_run, validated

_ENGINE_HELP = f"{', '.join(engine_names())}; or a JSON file of your own (docs/simulator.md)."


def validate(
    run: Annotated[Path, Argument(metavar="RUN", exists=True, help="A folder with requests.jsonl and meta.json, a result of `vllm bench serve --save-detailed`, or a table of closed loops (.csv).")],
    model: Annotated[str | None, Option(help=f"{', '.join(model_names())}; a checkpoint folder or its config.json; or a JSON file.", show_default="as the run says")] = None,
    device: Annotated[str | None, Option("--device", help=f"{', '.join(device_names())}; or a JSON file.", show_default="as the run says")] = None,
    dtype: Annotated[str | None, Option(help="Dtype of weights and activations.", show_default="as the run says")] = None,
    kv_dtype: KvDtype = None,
    quantization: Quantization = None,
    quantize_head: QuantizeHead = False,
    engine: Annotated[str | None, Option(help=_ENGINE_HELP, show_default="the nearest to what the run says")] = None,
    blocks: Annotated[int | None, Option(min=2, help="Number of blocks, as the engine counts them.", show_default="as the run says; else what fits beside the weights")] = None,
    tensor_parallel: Annotated[int | None, Option(min=1, help="Devices over which the model is split.", show_default="as the run says")] = None,
    data_parallel: Annotated[int | None, Option(min=1, help="Ranks, each with its own scheduler; with experts they step together.", show_default="as the run says")] = None,
    link_gbps: LinkGbps = None,
    link_us: LinkUs = None,
    published: Annotated[bool, Option("--published", help="Time steps by published figures, also where kernels were measured.")] = False,
    html: Annotated[Path | None, Option("--html", help="File for the page with plots.", show_default="validate-RUN.html; with --json none")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Simulate a recorded run from its arrivals and lengths alone, and show the errors of the simulation.

    TTFT and end to end count from when the engine got a request; TPOT is first to last token ÷ tokens after the first. Nothing is fitted
    to the run. Errors are signed: above 0 the simulation takes too long.

    Example: `paged validate RUN --html run.html`
    """
    asked = made_of(RunOptions, locals())
    if run.suffix == ".csv":
        if html is not None:
            raise InvalidConfig(f"--html shows one run; {run} is a table of closed loops")
        _closed(list(closed_loops(run, asked)), json)
        return
    recorded = read_run(run)
    if html is None and not json:
        html = Path(f"validate-{recorded.name}.html")
    check_outputs({"--html": html}, [run])
    found = validated(recorded, asked)
    if html is not None:
        write_validation_html(html, found)
    if json:
        print_json(found)
        return
    table(
        f"{found.run}, {found.engine}", ["", "measured", "simulated", "error"], validation_rows(found), right=(1, 2, 3)
    )
    printed(f"Steps are timed by {found.cost_model}. {found.preemptions:,} preemptions.")
    for note in found.assumed:
        printed(f"Note: {note}.")
    if html is not None:
        printed(f"Plots: {html}")


def _closed(cells: list[Cell], json: bool) -> None:
    if json:
        print_json(
            [
                {**msgspec.to_builtins(cell), "ttft_error": cell.ttft_error, "tpot_error": cell.tpot_error}
                for cell in cells
            ]
        )
        return
    groups = by_engine(cells)
    rows = [[*key, *_errors(of)] for key, of in groups.items()]
    if len(groups) > 1:
        rows.append(["all", "", "", "", *_errors(cells)])
    columns = ["engine", "model", "dtype", "devices", "runs", "TPOT, |error|", "signed", "TTFT, |error|", "signed"]
    table("closed loops: medians of the errors of means", columns, rows, right=range(4, len(columns)))
    for note in dict.fromkeys(note for cell in cells for note in cell.assumed):
        printed(f"Note: {note}, of {sum(note in cell.assumed for cell in cells):,} runs.")


def _errors(cells: list[Cell]) -> list[str]:
    shown = [f"{len(cells):,}"]
    for errors in ([cell.tpot_error for cell in cells], [cell.ttft_error for cell in cells]):
        shown += [f"{median(map(abs, errors)):.1%}", f"{median(errors):+.1%}"]
    return shown
