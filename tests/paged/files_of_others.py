"""Files as others write them: configurations, devices, profiles, recorded runs, tables of closed loops, of layers, of kernels."""

import csv
import json
import math
from functools import cache
from itertools import product
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from msgspec.structs import replace
from pytest import approx  # noqa: PT013

from paged.study.hardware import Profile, Tiling
from paged.study.simulator import RunOptions, read_run
from paged.study.simulator.closed_loops import COLUMNS
from paged.study.simulator.validation import prepared, simulation_of, taken_in
from paged.study.traces import Trace

# What published configurations say of a model's shape, by name.
CONFIGS = json.loads((Path(__file__).parent / "fixtures" / "model_configs.json").read_text(encoding="utf-8"))
TINY = {
    "name": "tiny", "hidden": 8, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 2, "intermediate": 16,
    "vocab": 10, "max_length": 64,
}  # fmt: skip
BOX = {"name": "box", "memory_bytes": 1000, "bandwidth": 100.0, "peak_flops": {"bf16": 1e3}, "host_link": 10.0}
PRICES = Profile(
    seconds_per_step=2e-3, seconds_per_computed_token=3e-5, seconds_per_sampled_row=1e-5,
    seconds_per_context_token=2e-8, seconds_per_attended_pair=5e-9, seconds_per_moved_token=4e-7,
)  # fmt: skip
TILED = replace(
    PRICES, seconds_per_tile=4e-3, seconds_per_sampling_tile=1e-3, seconds_per_tile_position=3e-5,
    tiling=Tiling(places=32, piece=64),
)  # fmt: skip


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def by_hand_in(name):
    """Of a fixture each call, and the line below it, which says by hand what it gives."""
    text = (Path(__file__).parent / "fixtures" / name).read_text(encoding="utf-8")
    return [pytest.param(*block.splitlines()[:2], id=block.splitlines()[0]) for block in text.split("\n>>> ")[1:]]


def assert_by_hand(call, by_hand, names):
    """Fail unless this call gives, to the rounding, what is said of it by hand. Names of this file are there, too."""
    found, expected = (eval(text, globals() | names) for text in (call, by_hand))
    assert found == expected or found == approx(expected, rel=1e-9), f"{found}, not {expected}"


def offered(*packages):
    """All public names of these packages; where two offer the same, that of the later one."""
    return {name: getattr(each, name) for each in packages for name in each.__all__}


def of(found, names):
    """Fields of a result."""
    return tuple(attrgetter(name)(found) for name in names.split())


ARRIVAL = np.linspace(0, 2, 40)
PROMPTS = np.tile([300, 800, 40, 1500], 10)
OUTPUTS = np.tile([60, 20, 90, 40], 10)
META = {
    "model": "meta-llama/Llama-3.1-8B",
    "vllm_version": "0.19.0",
    "engine_kwargs": {
        "dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 1024, "tensor_parallel_size": 1,
    },
    "kv_cache": {"num_gpu_blocks": 401, "block_size": 16, "enable_prefix_caching": True},
    "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
}  # fmt: skip


def meta_of(model="meta-llama/Llama-3.1-8B", device="NVIDIA RTX PRO 6000 Blackwell", **fields):
    engine = {**META["engine_kwargs"], **fields}
    return {**META, "model": model, "hardware": {"device_name": device}, "engine_kwargs": engine}


def write_rows(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(META))
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))


@cache
def simulated():
    """What the simulated engine of META did, to its end, with the rows of its requests before they have times."""
    blank = [
        {
            "input_toks": int(i), "output_toks": int(o), "arrival_time": 1e9 + a, "queued_ts": a, "first_token_ts": a,
            "last_token_ts": a,
        }
        for a, i, o in zip(ARRIVAL, PROMPTS, OUTPUTS)
    ]  # fmt: skip
    with TemporaryDirectory() as folder:
        write_rows(Path(folder), blank)
        run = read_run(Path(folder))
    simulation = simulation_of(Trace.from_lengths(ARRIVAL, PROMPTS, OUTPUTS), prepared(run.setup, RunOptions()))
    simulation.run()
    return simulation, blank


def write_run(folder, *, slower=1.0, spoil=lambda rows: rows):
    """A run as if the simulated engine had been recorded, each time so many times as long after the request was taken in."""
    simulation, blank = simulated()
    first, last = simulation.latencies.first, simulation.latencies.last
    rows = [
        {**row, "queued_ts": q, "first_token_ts": q + slower * (began - q), "last_token_ts": q + slower * (ended - q)}
        for row, q, began, ended in zip(blank, taken_in(ARRIVAL, simulation), first, last)
    ]
    write_rows(folder, spoil(rows))
    return simulation


def table(folder, **changed):
    row = dict(zip(COLUMNS, ("vllm", "", "meta-llama/Llama-3.1-70B", "h100_sxm", "fp8", 512, 64, 4, 4, 100, 12)))
    path = folder / "loops.csv"
    path.write_text(",".join(COLUMNS) + "\n" + ",".join(str({**row, **changed}[name]) for name in COLUMNS) + "\n")
    return path


CHUNKS, BEFORE, ROWS, LENGTHS = (0, 16, 64, 256), (0, 64, 512), (0, 1, 8, 64), (0, 128, 1024)


def seconds(chunk, before, rows, length):
    """A law: a launch, what is read, what is multiplied."""
    return 5e-6 + 2e-9 * rows * length + 1e-11 * chunk * (before + chunk / 2)


def write_folder(folder, change=lambda name, rows: rows):
    """A folder in the form of others, by the law; `change` may spoil a table's rows."""
    tokens = (1, 8, 64, 512)
    dense = [
        ["layer", "tokens", "time_us"],
        *([name, n, 10 + 0.1 * n] for name in ("qkv_proj", "layernorm", "embedding") for n in tokens),
    ]
    head = [["layer", "sequences", "time_us"], *([name, n, 20 + n] for name in ("lm_head", "sampler") for n in (1, 16))]
    sizes = (
        (c, k, n, v)
        for c, k, n, v in product(CHUNKS, BEFORE, ROWS, LENGTHS)
        if (c or n) and (c or not k) and bool(n) == bool(v)
    )
    attention = [
        ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"],
        *([*at, 1e6 * seconds(*at)] for at in sizes),
    ]
    for name, rows in (("dense", dense), ("per_sequence", head), ("attention", attention)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(change(name, rows))
    return folder


LAUNCH_MS = 0.004
KERNEL_ROWS = (1, 16, 17, 32, 33, 64, 65, 128, 129, 256)
WIDTHS = (256, 1024, 4096)
COUNTS = (1, 2, 4, 8)
TOKENS = (16, 256, 4096)


def product_ms(m, n, k):
    """A staircase: rows are computed 16 at a time, at half the H100's peak, and weights are read at half its bandwidth."""
    tiles = 16 * math.ceil(m / 16)
    return LAUNCH_MS + 1e3 * 2 * max(2 * tiles * n * k / 989.4e12, 2 * n * k / 3.35e12)


def attention_ms(batch, heads, tokens, is_prefill):
    seconds = batch * heads * tokens * (tokens / 2 if is_prefill else 1) * 128 * 4 / 100e12
    return 2 * LAUNCH_MS + 1e3 * (seconds + batch * tokens * 1e-9)


def kernel_tables():
    """A folder's tables of kernels by their names: rows of a known law."""
    attention = {"num_key_value_heads": 1, "head_dim": 128, "kv_cache_dtype": "bfloat16", "window_size": 0}
    sizes = list(product(COUNTS, (2, 8), TOKENS))
    return {
        "gemm_perf": [
            {"version": "1", "gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": product_ms(m, n, k)}
            for m, n, k in product(KERNEL_ROWS, WIDTHS, WIDTHS)
        ],
        "context_attention_perf": [
            {**attention, "batch_size": b, "num_heads": h, "isl": t, "latency": attention_ms(b, h, t, True)}
            for b, h, t in sizes
        ],
        "generation_attention_perf": [
            {**attention, "batch_size": b, "num_heads": h, "step": t - 1, "latency": attention_ms(b, h, t, False)}
            for b, h, t in sizes
        ],
        "custom_allreduce_perf": [
            {"backend": f"vllm_{how}", "num_gpus": g, "message_size": s, "latency": LAUNCH_MS + s * g * 1e-8}
            for how, g, s in product(("graph", "eager"), (2, 4), (1024, 65536, 1048576))
        ],
    }


def write_kernels(folder, of):
    for name, rows in of.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return folder
