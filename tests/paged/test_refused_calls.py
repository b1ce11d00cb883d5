"""Calls and files that cannot be: each is refused with what is wrong and what would do, and changes nothing."""
# ruff: noqa: F401  # the calls of the file take them from here

import json
from functools import cache
from math import inf, nan
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import paged
from paged import BlockManager, PagedError, Request, Scheduler
from paged.base.arguments import token_array
from paged.base.whole_file import whole_file
from paged.engine.replica_index import prompt_keys
from paged.engine.routing import Router, RoutingRules
from paged.model.layer_plan import Layers, Part, plan_layers
from paged.model.model_shape import Mixers
from paged.sampling import seed_of
from paged.serving.settings import KvEventsConfig, read_settings
from paged.study import hardware, simulator, tgi, traces
from paged.study.hardware import Roofline, StepWork, device_named, model_named
from paged.study.hardware.device import Link, link_of
from paged.study.hardware.kernels import KernelTables, fit_folder, kernels_named
from paged.study.hardware.kernels.layer_measurements import read_layers
from paged.study.hardware.measured import layers_in, measured_layers
from paged.study.profiling import designed
from paged.study.report import writable
from paged.study.simulator import Device, Load, Scenario, SessionRun, Targets, Tiers, plans, read_run
from paged.study.simulator.closed_loops import COLUMNS
from paged.study.simulator.stretch import skip
from paged.study.traces import Begun, Trace, open_sessions
from paged.testing.saved import load, rerun
from paged.testing.snapshots import snapshot

from ..shown import assert_refused, shown_in  # noqa: TID252
from . import files_of_others as theirs  # noqa: TID252
from .files_of_others import CONFIGS, PRICES as PROFILE, kernel_tables, meta_of, without, write_kernels, write_run  # noqa: TID252


def names(**more):
    """What calls may say: what is offered without torch (a Device is a simulation's), what others write, and what is here."""
    needs_torch = {"LLM", "AsyncEngine", "Engine", "LoadedModel", "load_model"}
    ours = {name: getattr(paged, name) for name in set(paged.__all__) - needs_torch}
    return ours | theirs.offered(hardware, simulator, traces) | vars(theirs) | globals() | more


def roofline(model="llama-2-13b", device="a100-40g", **options):
    return Roofline(model=model_named(model), device=device_named(device), **options)


def scheduler(**limits):
    """A scheduler on a manager of its own, which one that is refused has not claimed."""
    manager = BlockManager(8, 4)
    try:
        return Scheduler(manager, **limits)
    except PagedError:
        assert Scheduler(manager).check() == []
        raise


class Unspeakable:
    """Says that it is an integer, and cannot say which."""

    def __index__(self):
        raise ValueError("which?")


def added(**fields):
    """Add such a request; a scheduler that refuses it is as before."""
    empty = scheduler()
    try:
        empty.add(Request(**{"id": "a", "prompt": [1, 2, 3]} | fields))
    finally:
        assert not empty.has_unfinished and empty.counts()["submitted"] == 0 and empty.manager.device.num_used == 0


def of_requests(num_blocks, lengths, **limits):
    found = Scheduler(BlockManager(num_blocks, 4, prefix_caching=False), **limits)
    for id, length in lengths.items():
        found.add(Request(id=id, prompt=[1] * length, max_tokens=9))
    return found


def ended(tokens, counts=None):
    """End a batch of two rows that sample and a chunk that does not; one that this is refused for can still be ended."""
    ours = of_requests(16, {"a": 4, "b": 4, "chunk": 20}, max_tokens_per_step=16)
    batch, before = ours.schedule(), (snapshot(ours.manager), ours.stats())
    try:
        ours.update(batch, tokens, counts)
    finally:
        assert (snapshot(ours.manager), ours.stats()) == before
        assert [output.token_ids for output in ours.update(batch, [5, 6])] == [[5], [6]]


def drafted(drafts):
    """Such drafts for a scheduler in which "a" decodes and another request waits: refused, they change nothing."""
    ours = of_requests(20, {"a": 5, "waits": 4}, max_sequences=1, vocabulary_size=2000)
    ours.update(ours.schedule(), [70])
    before = snapshot(ours.manager), ours.stats()
    try:
        ours.schedule(drafts=drafts)
    finally:
        assert (snapshot(ours.manager), ours.stats()) == before


def skipped(tokens, **options):
    """Such tokens for steps at once of two rows that decode; refused, they change nothing."""
    ours = of_requests(64, {"a": 5, "b": 5}, vocabulary_size=5000)
    ours.update(ours.schedule(), [5, 6])
    before = snapshot(ours.manager), ours.stats()
    try:
        skip(ours, tokens, **options)
    finally:
        assert (snapshot(ours.manager), ours.stats()) == before


def steps(count):
    """So many steps of a token each."""
    return StepWork(computed_tokens=np.ones(count))


NINE = Tiers(device_blocks=9)


def played(tiers=NINE, begun=None, **options):
    """A run of a session that ships."""
    return SessionRun([Begun(open_sessions("agents")[0], 0)] if begun is None else begun, tiers, None, **options)


FORMULA = Device()
trace = Trace.from_lengths([0, 1, 4, 9, 9], [10, 20, 30, 40, 50], [1, 2, 3, 4, 5])


def planned(find="rate", *, policy="paged", device=FORMULA, trace="azure", clients=None, **options):
    """A plan of a small pool."""
    scenario = Scenario(load=Load(trace=trace, limit=5, clients=clients), device=device, policy=policy, blocks=60)
    return plans(find, [scenario], Targets(ttft_s=1), **options)


@pytest.mark.parametrize(("call", "shown"), shown_in("paged/fixtures/refused_calls.txt", ">>>"))
def test_a_call_that_makes_no_sense_is_refused_with_the_reason(monkeypatch, call, shown):
    # A plan is refused before anything is simulated.
    monkeypatch.setattr(Scenario, "simulation", None)
    assert_refused(call, shown, names())


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PLAIN = "arrival_s,prompt_tokens,output_tokens,prefix_id,prefix_tokens\n"
MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}
ROW = {"arrival_s": 0, "output_tokens": 4, "segments": [[7, 6], [None, 2]]}
PREFIXED = {"arrival_s": 0, "output_tokens": 4, "prompt_tokens": 9, "prefix_id": "bot", "prefix_tokens": 3}
LLAMA, DEEPSEEK_V3 = CONFIGS["LLAMA"], CONFIGS["DEEPSEEK_V3"]
TURN = {"t": 0, "in": 130, "out": 9, "blocks": [[0, 2]], "api_s": 1.0, "think_s": 0.5, "stop": "tool_use"}
PROGRAM = {
    "format": 1, "paged": "0.1.0", "rig": "ManagerRig", "world": {"num_blocks": 4}, "calls": [["add", [0, 1], None]],
    "found": ["1: something"],
}  # fmt: skip
SERVED = {"input_lens": [3], "output_lens": [2], "ttfts": [0.1], "itls": [[0.1]], "start_times": [0.0]}
HERE = Path()
PRICES = msgspec.to_builtins(PROFILE)
MINE = {"name": "mine", "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "vocab": 49152}


def spoilt(name, number, column, value):
    """A change of one cell of a row of the table of this name."""
    return lambda of, rows: [
        [*row[:column], value, *row[column + 1 :]] if (of, i) == (name, number) else row for i, row in enumerate(rows)
    ]


def turn(**fields):
    """A request of a recorded session, changed."""
    return TURN | fields


def session(*requests, **fields):
    return {"id": "a", "block_size": 64, "requests": list(requests) or [TURN]} | fields


def run_of(spoil=lambda rows: rows, **fields):
    """A recorded run whose requests are spoilt, or whose engine had such settings."""
    write_run(HERE / "run", spoil=spoil)
    (HERE / "run" / "meta.json").write_text(json.dumps(meta_of(**fields)))
    return read_run(HERE / "run")


def described_run(meta, *ticks):
    """A recorded run with this description, whose engine logged these ticks."""
    write_run(HERE / "run")
    (HERE / "run" / "meta.json").write_text(json.dumps(meta))
    (HERE / "run" / "timeseries.csv").write_text("\n".join(("t,running,waiting,kv_cache_pct", *ticks)))
    return read_run(HERE / "run")


def of_text(*lines):
    """Tables of kernels of an H100, whose products are these lines."""
    write_kernels(HERE, kernel_tables())
    Path("gemm_perf.csv").write_text("\n".join(lines))
    return fit_folder(HERE, "h100")


def kernels(change=lambda i, row: row, lacks=""):
    """Tables of kernels of an H100, of which one is missing, or whose products are changed row by row."""
    of = without(kernel_tables(), lacks)
    of |= {"gemm_perf": [change(i, row) for i, row in enumerate(of["gemm_perf"])]} if "gemm_perf" in of else {}
    return fit_folder(write_kernels(HERE, of), "h100")


def latency(value):
    return lambda i, row: row | {"latency": value} if i == 7 else row


@cache
def shipped_kernels():
    """The text of the file of kernels that ships."""
    kernels_named("h200").save("mine.json")
    return Path("mine.json").read_text()


def layers_of(device):
    """A file of the layers of llama-3.1-8b that are measured on a device."""
    measured_layers(roofline("llama-3.1-8b", device)).save("own.json")
    return "own.json"


def kernel_file(spoil):
    """That file, spoilt."""
    document = json.loads(shipped_kernels())
    spoil(document)
    Path("mine.json").write_text(json.dumps(document))
    return KernelTables.load("mine.json")


@pytest.mark.parametrize(("call", "shown"), shown_in("paged/fixtures/refused_files.txt", ">>>"))
def test_a_file_that_cannot_be_is_refused_where_it_is_wrong(tmp_path, monkeypatch, call, shown):
    def written(*lines, name="file.json"):
        """A file of text, bytes or documents, a line each."""
        texts = [json.dumps(each) if isinstance(each, dict) else each for each in lines]
        Path(name).write_bytes(b"\n".join(each.encode() if isinstance(each, str) else each for each in texts))
        return name

    monkeypatch.chdir(tmp_path)
    error = assert_refused(call, shown, names(written=written), PagedError)
    path, line = (getattr(error, name, None) for name in ("path", "line"))
    assert path is None or str(error).startswith(f"{path}, line {line}" if line else str(path))
