"""The simulator held against recorded runs of serving systems on GPUs, and against measured closed loops.

    python benchmarks/validation.py FOLDER --out benchmarks/results/validation.md

FOLDER holds runs/ (recorded runs and closed_loop.csv) and kernels/ (the layers' tables). The host's seconds a step are the only figure that was
fitted to any run: each run is shown with what the other one gives, and with none. Layers' tables are held out as the kernel tables are.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from paged.cli.profile import errors_of_layers
from paged.study.hardware import Roofline, StepWork, device_named, kernels, model_named
from paged.study.hardware.derived_layers import DerivedLayers, Timing
from paged.study.hardware.device import Link
from paged.study.hardware.kernels import KernelError
from paged.study.hardware.kernels.layer_measurements import LayerMeasurements, described, read_layers
from paged.study.hardware.kernels.layer_tables import LayerTables
from paged.study.hardware.measured import step_from, step_of
from paged.study.report import validation_rows
from paged.study.simulator import (
    METRICS,
    STATISTICS,
    Cell,
    RunOptions,
    Validation,
    by_engine,
    closed_loops,
    engine_named,
    read_run,
    validated,
)

RUNS = ("rtx4090-llama-3.1-8b", "rtxpro6000-llama-3.1-8b")
LAYERS = {
    "rtx4090-llama-3.1-8b": "rtx4090",
    "rtxpro6000-llama-3.1-8b": "rtxpro6000",
    "rtxpro6000-qwen3-32b": "rtxpro6000",
}
HOSTS_MS = (0.0, 0.1, 0.25, 0.5)
GOAL = 0.03
CASES = [
    *product(("llama-3.1-8b", "llama-2-13b"), ("a100-80g", "h100", "h200"), ("bf16",), (1,)),
    *product(("qwen3-32b",), ("a100-80g", "h100", "h200"), ("bf16",), (2,)),
    *product(("llama-3.1-70b",), ("a100-80g", "h100", "h200"), ("bf16",), (4,)),
    *product(("llama-3.1-8b",), ("h100", "h200"), ("fp8",), (1,)),
    *product(("llama-3.1-70b",), ("h100", "h200"), ("fp8",), (2,)),
    *product(("llama-3.1-8b",), ("rtx4090", "rtxpro6000"), ("bf16",), (1,)),
    ("qwen3-32b", "rtxpro6000", "bf16", 1),
]
_SHIPPED = Path(kernels.__file__).parent / "layers"
_STEPS = {
    "1 decodes at 1,000": StepWork.of_rows([1], [1000], sampled_rows=1),
    "64 decode at 1,000": StepWork.of_rows([1] * 64, [1000] * 64, sampled_rows=64),
    "128 decode at 1,200": StepWork.of_rows([1] * 128, [1200] * 128, sampled_rows=128),
    "a prompt of 2,048": StepWork.of_rows([2048], [2048], sampled_rows=1),
    "120 decode at 900 beside two prompts of 900": StepWork.of_rows(
        [1] * 120 + [900] * 2, [900] * 122, sampled_rows=122
    ),
}
WORKS = {
    "prompts": [StepWork.of_rows([n], [n], sampled_rows=1) for n in (512, 2048, 4096)],
    "decoding": [
        StepWork.of_rows([1] * n, [length] * n, sampled_rows=n)
        for n, length in ((1, 1024), (16, 1024), (64, 1024), (128, 2048), (256, 512))
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--date", default="")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    page = "\n".join(lines(asked.folder, asked.date))
    print(page)
    if asked.out:
        asked.out.write_text(page + "\n")


def lines(folder: Path, date: str) -> Iterator[str]:
    """The page."""
    yield "# Simulated and measured"
    yield ""
    yield f"`python benchmarks/validation.py FOLDER`, {date}, Python {platform.python_version()}, numpy {np.__version__}. No GPU here: runs were recorded by"
    yield "[casys-kaist/LLMServingSim](https://github.com/casys-kaist/LLMServingSim) (MIT) and"
    yield "[ai-dynamo/aiconfigurator](https://github.com/ai-dynamo/aiconfigurator) (Apache-2.0). Virtual time: the same command gives the same"
    yield "figures anywhere. Errors are signed: above 0 the simulation is too long. What misses its goal is bold."
    for name in RUNS:
        yield from _run(folder / "runs" / name)
    yield from _both_ways(folder)
    cells = list(closed_loops(folder / "runs" / "closed_loop.csv"))
    yield from _closed(cells)
    yield from _layers(folder / "kernels")
    yield from _derived()
    yield from _published()


def _published() -> Iterator[str]:
    """The roofline's steps against those of measured kernels; its efficiencies as they are by default, and as they would fit best."""
    yield ""
    yield "## Published figures against measured kernels"
    yield ""
    yield "Steps of a roofline ÷ those of measured kernels − 1, over 19 models on devices (8B to 70B, bf16 and fp8, up to 4 devices): prompts of 512 to"
    yield "4,096 tokens, and 1 to 256 decoding sequences. The default is what `paged simulate` says as its band; the least median of the logarithms is"
    yield "at 0.65 and 0.70."
    yield ""
    yield "| efficiencies, arithmetic and memory | steps | p10 | median | p90 |"
    yield "|---|---|--:|--:|--:|"
    for compute, memory in ((0.6, 0.8), (0.65, 0.7)):
        for kind, works in WORKS.items():
            errors = [error for case in CASES for error in _off(case, works, compute, memory)]
            low, middle, high = np.quantile(errors, (0.1, 0.5, 0.9))
            yield f"| {compute:.2f}, {memory:.2f} | {kind} | {low:+.0%} | {middle:+.0%} | {high:+.0%} |"


def _derived() -> Iterator[str]:
    """Steps of one model's layers derived from the other's alone, against its own tables; and of two devices against one."""
    yield ""
    yield "## Layers derived from another model's"
    yield ""
    yield "A model that was not timed on a device, and one that is split over several, gets its layers from tables of others there. Here each model of"
    yield "the RTX PRO 6000 has the other's alone. Steps ÷ those of its own tables − 1. Then steps of two devices ÷ those of one, over a link that takes"
    yield "nothing, over PCIe as it is assumed (`paged/study/hardware/device.py`), and over 51 GB/s and 5 µs. No run of two such devices is here."
    yield ""
    yield "| model | step | one device, from the other's layers | two ÷ one, link for nothing | PCIe as assumed | 51 GB/s, 5 µs |"
    yield "|---|---|--:|--:|--:|--:|"
    links = (Link(bytes_per_s=1e18, latency_s=0.0), None, Link(bytes_per_s=51e9, latency_s=5e-6))
    for name, other in (("llama-3.1-8b", "qwen3-32b"), ("qwen3-32b", "llama-3.1-8b")):
        one = _on_card(name)
        own = step_of(one)
        layers = DerivedLayers(
            (Timing(LayerTables.load(_SHIPPED / f"rtxpro6000-{other}.json"), model_named(other)),), one
        )
        derived = step_from(layers, one)
        pairs = [step_of(msgspec.structs.replace(one, tensor_parallel=2, link=link)) for link in links]
        for said, work in _STEPS.items():
            seconds = own.seconds(work)
            shares = " | ".join(f"{pair.seconds(work) / seconds:.2f}" for pair in pairs)
            yield f"| {name} | {said} | {derived.seconds(work) / seconds - 1:+.1%} | {shares} |"


def _on_card(model: str) -> Roofline:
    return Roofline(model=model_named(model), device=device_named("rtxpro6000"))


def _off(case: tuple[str, str, str, int], works: list[StepWork], compute: float, memory: float) -> list[float]:
    model, device, dtype, degree = case
    roofline = Roofline(
        model=model_named(model),
        device=device_named(device),
        dtype=dtype,
        tensor_parallel=degree,
        compute_efficiency=compute,
        memory_efficiency=memory,
    )
    measured = step_of(roofline)
    return [float(roofline.seconds(work) / measured.seconds(work) - 1) for work in works]


def _run(path: Path) -> Iterator[str]:
    found = validated(read_run(path))
    peer = dict(_peer(path / "peer_simulator.txt"))
    yield ""
    yield f"## {path.name}"
    yield ""
    yield f"{found.engine}; {found.cost_model}. {found.preemptions:,} preemptions. Goal: 3 %."
    yield ""
    yield "| | measured | simulated | error | its publishers' own simulator |"
    yield "|---|--:|--:|--:|--:|"
    for name, measured, simulated, error in validation_rows(found):
        is_over = "apart" not in error and abs(float(error.rstrip("%")) / 100) > GOAL
        yield f"| {name} | {measured} | {simulated} | {_bold(error, is_over)} | {peer.get(name, '')} |"
    yield ""
    yield from (f"* {note}" for note in found.assumed)


def _both_ways(folder: Path) -> Iterator[str]:
    yield ""
    yield "## What was fitted, and on what"
    yield ""
    yield "One figure, the seconds of each step in which the device waits for the host. Largest and mean absolute error of the 13 figures of a run,"
    yield "by that figure; the description of vLLM 0.19 has what fits the RTX PRO 6000 best (the least mean), and the RTX 4090 judges it. The other"
    yield "way round the RTX 4090 would choose 0, and the RTX PRO 6000 judge that."
    yield ""
    yield f"| host, ms a step | {' | '.join(f'{name}: mean, largest' for name in RUNS)} |"
    yield f"|--:|{'--:|' * len(RUNS)}"
    for host in HOSTS_MS:
        cells = []
        for name in RUNS:
            found = _with_host(folder / "runs" / name, host / 1e3)
            errors = [abs(found.errors["makespan"]["mean"])]
            errors += [abs(found.errors[metric][statistic]) for metric in METRICS[1:] for statistic in STATISTICS]
            cells.append(f"{np.mean(errors):.1%}, {max(errors):.1%}")
        yield f"| {host:g} | {' | '.join(cells)} |"


def _with_host(path: Path, host_s: float) -> Validation:
    """A run under vLLM 0.19 with another share of the host."""
    engine = engine_named("vllm-0.19")
    other = msgspec.structs.replace(engine, launching=msgspec.structs.replace(engine.launching, host_s=host_s))
    return validated(read_run(path), RunOptions(), engine=other)


def _closed(cells: list[Cell]) -> Iterator[str]:
    yield ""
    yield "## Closed loops"
    yield ""
    yield "222 runs at a fixed concurrency; medians of errors of means, and from the 10th to the 90th percentile. Goals: 10 % for the time a token, 20 %"
    yield "for the time to first token. One figure was fitted, on the runs of two devices against those of one: 5 µs of each all-reduce beside what it"
    yield "takes alone (without it -12.6 % on eight devices). Assumed: ten requests a client, lengths from 0.8 to 1 of the named ones."
    yield ""
    yield "| engine | model | dtype | devices | runs | TPOT, absolute | signed | p10 to p90 | TTFT, absolute | signed |"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|--:|"
    by_devices = [
        (("all", "", "", f"{devices}"), [cell for cell in cells if cell.tensor_parallel == devices])
        for devices in sorted({cell.tensor_parallel for cell in cells})
    ]
    for key, of in (*sorted(by_engine(cells).items()), *by_devices, (("all", "", "", ""), cells)):
        tpot, ttft = [cell.tpot_error for cell in of], [cell.ttft_error for cell in of]
        spread = [
            _bold(f"{median(map(abs, errors)):.1%}", median(map(abs, errors)) > goal)
            for errors, goal in ((tpot, 0.1), (ttft, 0.2))
        ]
        low, high = np.quantile(tpot, (0.1, 0.9))
        between = f"{low:+.0%} to {high:+.0%}"
        yield f"| {' | '.join(key)} | {len(of)} | {spread[0]} | {median(tpot):+.1%} | {between} | {spread[1]} | {median(ttft):+.1%} |"
    yield ""
    for note in dict.fromkeys(note for cell in cells for note in cell.assumed):
        yield f"* {note}: {sum(note in cell.assumed for cell in cells)} runs."
    yield "* TensorRT-LLM's TTFT rises with the *output's* length, the less the more clients there are: in milliseconds an output token, times clients"
    yield f"  ÷ TPOT, {_slopes(cells):.2f} in the median, about as if one client fewer were served than there are. That was taken over into its description"
    yield "  (`reserved_rows`); no figure was fitted. With all clients served the median TTFT of its runs would be 50 to 79 % too short, as it was before."


def _slopes(cells: list[Cell]) -> float:
    """Of TensorRT-LLM's runs alike but for their outputs, the longest against the shortest."""
    groups: dict[tuple[int, int, int], list[Cell]] = {}
    for cell in cells:
        if cell.backend == "trtllm":
            groups.setdefault((cell.prompt_tokens, cell.clients, cell.tensor_parallel), []).append(cell)
    found = []
    for of in groups.values():
        of.sort(key=lambda cell: cell.output_tokens)
        first, last = of[0], of[-1]
        if last.output_tokens > first.output_tokens:
            rise = (last.ttft_s - first.ttft_s) / (last.output_tokens - first.output_tokens)
            found.append(rise * last.clients / last.tpot_s)
    return median(found)


def _layers(folder: Path) -> Iterator[str]:
    yield ""
    yield "## Tables of layers"
    yield ""
    yield "As the [kernel tables](kernel-errors.md): median / 90th percentile (rows) of |answered ÷ measured − 1|. Goals: 3 / 10 % for every tenth row,"
    yield "6 / 20 % for the largest number of decoding sequences. Of the RTX PRO 6000 two series of sizes were timed; the tables keep one, so every tenth"
    yield "row holds many of the other, far from any that was kept."
    yield ""
    yield "| tables | kind | every tenth row held out | most sequences held out | file that ships, all rows |"
    yield "|---|---|--:|--:|--:|"
    for name, device in LAYERS.items():
        measured = read_layers(folder / name)
        shape = described(folder / name)["model"]
        whole = errors_of_layers(_fit(measured, name, device, shape), measured)
        tenth = _held_out(measured, name, device, shape, lambda sizes: np.arange(len(sizes)) % 10 == 9)
        most = _held_out(measured, name, device, shape, lambda sizes: sizes == sizes.max())
        for kind, error in whole.items():
            cells = [_cell(tenth.get(kind), 0.03, 0.1), _cell(most.get(kind), 0.06, 0.2), _cell(error, 1, 1)]
            yield f"| {name} | {kind} | {' | '.join(cells)} |"


def _held_out(measured, name, device, shape, rule) -> dict[str, KernelError]:
    """Errors on rows that a fit did not see; `rule` picks them by a column: sequences of attention, sizes of a layer."""

    def split(columns):
        out = {layer: rule(sizes) for layer, (sizes, _) in columns.items()}
        return (
            {layer: (sizes[~out[layer]], seconds[~out[layer]]) for layer, (sizes, seconds) in columns.items()},
            {layer: (sizes[out[layer]], seconds[out[layer]]) for layer, (sizes, seconds) in columns.items()},
        )

    sizes, seconds = measured.attention
    is_out = rule(sizes[:, 2])
    dense, dense_out = split(measured.dense)
    head, head_out = split(measured.head)
    tables = _fit(LayerMeasurements(dense, head, (sizes[~is_out], seconds[~is_out])), name, device, shape)
    return errors_of_layers(tables, LayerMeasurements(dense_out, head_out, (sizes[is_out], seconds[is_out])))


def _fit(measured: LayerMeasurements, name: str, device: str, shape: str) -> LayerTables:
    return LayerTables.fit(measured, name=name, device=device, model=model_named(shape))


def _cell(error: KernelError | None, median_goal: float, p90_goal: float) -> str:
    if error is None:
        return ""
    text = f"{error.median:.1%} / {error.p90:.1%} ({error.rows:,})"
    return _bold(text, error.median > median_goal or error.p90 > p90_goal)


def _bold(text: str, is_missed: bool) -> str:
    return f"**{text}**" if is_missed else text


def _peer(path: Path) -> Iterator[tuple[str, str]]:
    """What the publishers' simulator was off by, by the name of our row."""
    metrics = {"TTFT": "time to first token", "TPOT": "time a token after it", "Latency": "end to end"}
    statistics = {"Mean": "mean", "Median": "p50", "P90": "p90", "P99": "p99"}
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) == 5 and words[0] in metrics and words[1] in statistics:
            yield f"{metrics[words[0]]}, {statistics[words[1]]}", words[4]


if __name__ == "__main__":
    main()
