"""Files that cannot be: each is refused with its name, the line, column or field, and what is wrong there."""
# ruff: noqa: F401  # the calls of the file take them from here

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest

from paged import EngineConfig, PagedError
from paged.base.whole_file import whole_file
from paged.serving.settings import read_settings
from paged.study.hardware import Profile, Roofline, device_named, model_named
from paged.study.hardware.kernels import KernelTables, fit_folder, kernels_named
from paged.study.hardware.kernels.layer_measurements import read_layers
from paged.study.hardware.measured import layers_in
from paged.study.report import writable
from paged.study.simulator import RunOptions, closed_loops, read_run, validated
from paged.study.simulator.closed_loops import COLUMNS
from paged.study.traces import read_sessions, read_trace
from paged.testing.saved import load, rerun

from ..shown import assert_refused, shown_in  # noqa: TID252
from . import files_of_others as theirs  # noqa: TID252
from .files_of_others import CONFIGS, PRICES as PROFILE, kernel_tables, meta_of, without, write_kernels, write_run  # noqa: TID252

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
    error = assert_refused(call, shown, vars(theirs) | globals() | {"written": written}, PagedError)
    path, line = (getattr(error, name, None) for name in ("path", "line"))
    assert path is None or str(error).startswith(f"{path}, line {line}" if line else str(path))
