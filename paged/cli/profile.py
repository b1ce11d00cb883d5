"""`paged profile`: the time of the engine's steps on this machine, or of tables that others timed, as a file for `paged simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import typer

from paged.attention.kv_dtypes import AUTO
from paged.base.words import counted
from paged.cli.commands import made_of, must_be_read
from paged.cli.models import (
    MODEL,
    Backend,
    Dtype,
    Fast,
    KvCacheDtype,
    ModelOptions,
    Quantization,
    QuantizeHead,
    Shape,
)
from paged.cli.options import Json, check_outputs
from paged.cli.show import counting, figures, print_json, printed, table
from paged.errors import InvalidConfig
from paged.model.machine import machine
from paged.study.hardware import Profile, device_named, device_names, model_named
from paged.study.hardware.kernels import KernelError, fit_folder
from paged.study.hardware.kernels.layer_measurements import LayerMeasurements, described, is_layer_folder, read_layers
from paged.study.hardware.kernels.layer_tables import LayerTables
from paged.study.profiling import KINDS, StepTimes, TimedStep, designed, engine_for

if TYPE_CHECKING:
    from paged.model.loading import LoadedModel

_DESIGN, _TIMING, _TABLES = "Which steps", "How they are timed", "Tables of others"
_MOST_CONTEXT = 512
_OF_TABLES = ("out", "shape", "import_", "on", "source", "license", "json")
"""Parameters that --import reads."""
_VERSIONS = {"vLLM": "vllm_version", "CUDA": "cuda_version", "card": "gpu", "taken": "profiled_at"}
"""By our name of a version, its field in a folder's own description."""


def profile(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File for the profile.")] = Path("profile.json"),
    model: Annotated[str | None, typer.Option("--model", "-m", help="A checkpoint folder in the Hugging Face layout, or a small model that ships: embedded or hybrid.", show_default="embedded", rich_help_panel=MODEL)] = None,
    shape: Shape = None,
    backend: Backend = "auto",
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    quantize_head: QuantizeHead = False,
    kv_cache_dtype: KvCacheDtype = AUTO,
    device: Annotated[str, typer.Option(help="cpu, or cuda.", rich_help_panel=MODEL)] = "cpu",
    fast: Fast = False,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences in a step, at most.", rich_help_panel=_DESIGN)] = 32,
    max_context: Annotated[int | None, typer.Option(min=1, help="Tokens that a row attends to, at most.", show_default=f"{_MOST_CONTEXT}, or what the model takes", rich_help_panel=_DESIGN)] = None,
    max_tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens in a step, at most.", rich_help_panel=_DESIGN)] = 256,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.", rich_help_panel=_DESIGN)] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of timing.", rich_help_panel=_TIMING)] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch's threads; a small model always runs on one.", show_default="torch's own choice", rich_help_panel=_TIMING)] = None,
    import_: Annotated[Path | None, typer.Option("--import", metavar="FOLDER", help="Fit tables of kernels or layers that others timed (docs/hardware.md), instead of timing steps here.", rich_help_panel=_TABLES)] = None,
    on: Annotated[str | None, typer.Option("--on", metavar="DEVICE", help=f"Device of the timings: {', '.join(device_names())}; or a JSON file.", show_default="none", rich_help_panel=_TABLES)] = None,
    source: Annotated[str, typer.Option(help="Source of the timings; kept in the file.", show_default="none", rich_help_panel=_TABLES)] = "",
    license: Annotated[str, typer.Option(help="Licence of the timings; kept in the file.", show_default="none", rich_help_panel=_TABLES)] = "",  # noqa: A002
    json: Json = False,
) -> None:  # fmt: skip
    """Time steps of the engine, fit a price to each amount of their work, and write a profile for `paged simulate --profile`.

    The steps vary the number of decoding rows, the lengths of their contexts, the sizes of prompts' chunks, and these together. Each is timed
    once a round, after a round that does not count; the fit is to its median. Some are held out: the table shows the profile's errors on them.
    Nothing else should run meanwhile.

    With --import nothing is timed: a folder of tables becomes such a file, with the errors of the fit. --shape names the layers' model, if the folder does not.

    Example: `paged profile --shape smollm-135m --max-context 160 --out smollm.json`
    """
    if import_ is not None:
        must_be_read(context, _OF_TABLES, "changes nothing of tables that were timed")
        check_outputs({"--out": out}, [import_])
        imported(import_, out, on=on, shape=shape, source=source, licence=license, json=json)
        return
    for option, value in (("--on", on), ("--source", source), ("--license", license)):
        if value:
            raise InvalidConfig(f"{option} {value} goes with --import; without it steps are timed here")
    named = made_of(ModelOptions, locals())
    check_outputs({"--out": out}, [shape])
    # Refuse wrong sizes before a model is loaded.
    sizes = {"max_sequences": max_sequences, "max_tokens_per_step": max_tokens_per_step, "block_size": block_size}
    design = designed(max_context=max_context or _MOST_CONTEXT, **sizes)
    loaded = named.loaded("profiling")
    if max_context is None:
        design = designed(max_context=_context_for(loaded, max_tokens_per_step, block_size), **sizes)
    engine = engine_for(loaded, design, **named.engine_options)
    times = StepTimes(engine, design)
    with counting("rounds", 1 + rounds) as advance:
        for run in (times.warm_up, *[times.round] * rounds):
            run()
            advance()
    found = times.profile(_about(engine, fast), name=named.name)
    found.save(out)
    if json:
        print_json(
            {**msgspec.to_builtins(found), "file": str(out), "rounds": rounds, "by_step": _by_step(times, found)}
        )
        return
    columns = ["steps", "fitted", "held out", "median error", "p90 error", "in total", "spread, median", "spread, p90"]
    rows = [_cells(kind, times.steps, found) for kind in (*KINDS, None)]
    title = f"{named.name}: profile and timed steps, {rounds} rounds; errors on those that were held out"
    table(title, columns, rows, right=range(1, len(columns)))
    figures("what a step takes", [*_prices(found), ("taken on", found.about), ("written to", str(out))])


def _context_for(model: LoadedModel, max_tokens_per_step: int, block_size: int) -> int:
    """Return the context that a model has room for beside a whole step's chunk, and at least what a design needs."""
    room = _MOST_CONTEXT if model.max_length is None else model.max_length - max_tokens_per_step - 1
    return max(min(_MOST_CONTEXT, room), 4 * block_size)


def _about(engine: Any, fast: bool) -> str:
    import torch

    from paged.study.bench.engine import precision_of

    here = machine()
    mode = "packed" if fast else "batch-invariant"
    dtype = precision_of(engine)
    threads = counted(torch.get_num_threads(), "thread")
    versions = ", ".join(f"{name} {here[name]}" for name in ("paged", "python", "torch", "transformers"))
    return (
        f"{here['processor']}, {engine.model.device.type}, {threads}, {dtype}, {mode}, "
        f"{engine.runner.backend.name}; {versions}"
    )


def _cells(kind: str | None, steps: list[TimedStep], found: Profile) -> list[str]:
    of_kind = [step for step in steps if kind in (step.kind, None)]
    num_held_out = sum(step.is_held_out for step in of_kind)
    error = found.held_out if kind is None else found.by_kind.get(kind)
    spreads = [step.spread for step in of_kind]
    errors = ["none"] * 3 if error is None else [f"{error.median:.1%}", f"{error.p90:.1%}", f"{error.total:+.1%}"]
    shown = ["none"] * 2 if not spreads else [f"{float(np.quantile(spreads, part)):.1%}" for part in (0.5, 0.9)]
    return [kind or "all", f"{len(of_kind) - num_held_out:,}", f"{num_held_out:,}", *errors, *shown]


def _prices(found: Profile) -> list[tuple[str, str]]:
    priced = (
        ("a step", found.seconds_per_step),
        ("a tile", found.seconds_per_tile),
        ("a tile that samples", found.seconds_per_sampling_tile),
        ("a position that a tile goes over", found.seconds_per_tile_position),
        ("a computed token", found.seconds_per_computed_token),
        ("a sampled row", found.seconds_per_sampled_row),
        ("a token of context", found.seconds_per_context_token),
        ("a pair attended to", found.seconds_per_attended_pair),
        ("a token moved to or from the host", found.seconds_per_moved_token),
    )
    return [(name, _micros(seconds)) for name, seconds in priced if seconds]


def _micros(seconds: float) -> str:
    micros = seconds * 1e6
    return f"{micros:,.0f} µs" if micros >= 100 else f"{micros:.3g} µs"


def _by_step(times: StepTimes, found: Profile) -> list[dict[str, Any]]:
    return [
        {
            "kind": step.kind,
            "is_held_out": step.is_held_out,
            "work": msgspec.to_builtins(step.work),
            "seconds": step.seconds,
            "predicted_s": float(found.seconds(step.work)),
        }
        for step in times.steps
    ]


def imported(
    folder: Path, out: Path, *, on: str | None, shape: str | None, source: str, licence: str, json: bool
) -> None:
    """Fit a folder's tables, write them to `out`, and show the errors of the fit. Raises InvalidConfig for an option that is missing or
    has no use, and what is wrong in the folder."""
    if on is None:
        raise InvalidConfig("--import needs --on, the device on which they were timed")
    if not folder.is_dir():
        raise InvalidConfig(f"{folder}: no such folder; --import takes a folder of tables")
    if is_layer_folder(folder):
        said = described(folder)
        shape = shape or said.get("model")
        if shape is None:
            raise InvalidConfig(f"{folder} does not say whose layers it has; --shape does")
        measured = read_layers(folder)
        tables = LayerTables.fit(
            measured,
            name=folder.resolve().name,
            device=device_named(on).name,
            model=model_named(shape),
            skew=float(said.get("skew", 0)),
            versions={
                name: said[key].partition("T")[0] if name == "taken" else said[key]
                for name, key in _VERSIONS.items()
                if key in said
            },
            source=source,
            license=licence,
        )
        tables.save(out)
        errors, spans = errors_of_layers(tables, measured), tables.measured
    else:
        if shape is not None:
            raise InvalidConfig(f"{folder} has kernels of any model; --shape goes with a folder of layers")
        if licence and not source:
            raise InvalidConfig(f"--license {licence} goes with --source; of kernels give both, or neither")
        kernels = fit_folder(folder, on, **({"source": source, "license": licence} if source else {}))
        kernels.save(out)
        errors, spans = kernels.errors, {}
    if json:
        print_json({"file": str(out), "device": on, "errors": errors, "measured": spans})
        return
    rows = [[kind, f"{error.rows:,}", f"{error.median:.1%}", f"{error.p90:.1%}"] for kind, error in errors.items()]
    table(
        f"{folder.resolve().name}: fitted and measured",
        ["kind", "rows", "median error", "p90 error"],
        rows,
        right=(1, 2, 3),
    )
    if spans:
        figures("measured", [(name, f"{least:,} to {most:,}") for name, (least, most) in spans.items()])
    printed(f"Written to {out}: `paged simulate TRACE --model … --device {on} --profile {out}` uses it.")


def errors_of_layers(tables: LayerTables, measured: LayerMeasurements) -> dict[str, KernelError]:
    """Return how far layers' tables are from timed layers, by kind."""
    sizes, seconds = measured.attention
    answered = tables.layer_attention.at(*sizes.T)
    kinds = {
        "attention, decode": sizes[:, 0] == 0,
        "attention, prefill": sizes[:, 2] == 0,
        "attention, mixed": (sizes[:, 0] > 0) & (sizes[:, 2] > 0),
    }
    found = {kind: KernelError.of(answered[rows], seconds[rows]) for kind, rows in kinds.items() if rows.any()}
    for kind, layers, fitted in (("dense", measured.dense, tables.dense), ("per sequence", measured.head, tables.head)):
        of = [(fitted[name].seconds(at), timed) for name, (at, timed) in layers.items()]
        found[kind] = KernelError.of(np.concatenate([each for each, _ in of]), np.concatenate([each for _, each in of]))
    return found
