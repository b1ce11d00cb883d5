"""`paged profile --import`: a folder of tables that others timed, as a file for `paged simulate --profile`."""

from pathlib import Path

import numpy as np

from paged.cli.show import figures, print_json, printed, table
from paged.errors import InvalidConfig
from paged.study.hardware import device_named, model_named
from paged.study.hardware.kernels import KernelError, fit_folder
from paged.study.hardware.kernels.layer_measurements import LayerMeasurements, described, is_layer_folder, read_layers
from paged.study.hardware.kernels.layer_tables import LayerTables

_VERSIONS = {"vLLM": "vllm_version", "CUDA": "cuda_version", "card": "gpu", "taken": "profiled_at"}
"""By our name of a version, its field in a folder's own description."""


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
