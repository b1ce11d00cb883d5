"""Recorded runs of serving systems: requests with their times, and the engine's setup.

    requests.jsonl   input_toks, output_toks, arrival_time, queued_ts, scheduled_ts, first_token_ts, last_token_ts (seconds), a line a request
    meta.json        model, engine_kwargs, kv_cache, hardware
    timeseries.csv   t, running, waiting, kv_cache_pct, a line a second; may be missing

or one JSON file as `vllm bench serve --save-result --save-detailed` writes it. Of vLLM's configuration some fields are read, some are refused unless
their value changes nothing, and some are harmless; the result of a validation names any other field.
"""

import sys
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from paged.base.fields import AtLeast1
from paged.errors import BadRun
from paged.study.files import Line, csv_lines, json_lines, json_object

Times = NDArray[np.float64]
Counts = NDArray[np.int64]
_Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class RunSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The setup that a run states; None for what it does not state.

    num_blocks    blocks of each rank by the engine's count
    device_name   the driver's name of the device
    runs_ahead    the engine decides a step while the one before runs
    refused       fields that change the meaning of the run and are not modelled, with their values
    not_modelled  other fields that a simulation leaves out, a sentence each
    """

    model: str | None = None
    engine_version: str | None = None
    device_name: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    quantization: str | None = None
    tensor_parallel: int = 1
    data_parallel: int = 1
    max_tokens_per_step: int | None = None
    max_sequences: int | None = None
    max_model_len: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    prefix_caching: bool | None = None
    memory_share: float | None = None
    runs_ahead: bool | None = None
    refused: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()


class Series(msgspec.Struct, frozen=True, eq=False):
    """An engine's log, float64 [ticks]: seconds since its first request, sequences that run and wait, share of KV in use (0 to 1)."""

    t: Times
    running: Times
    waiting: Times
    kv_usage: Times


class RecordedRun(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Requests in order of arrival; times in seconds since the first arrival, float64 [n].

    arrival      when it was sent
    queued       when the engine took it in
    first, last  when its first and last token came
    clients      of a closed loop; None: requests came at their own times
    """

    name: str
    setup: RunSetup
    arrival: Times
    queued: Times
    first: Times
    last: Times
    prompt_tokens: Counts
    output_tokens: Counts
    series: Series | None = None
    clients: int | None = None


class _Request(msgspec.Struct):
    """A line of a requests.jsonl."""

    input_toks: AtLeast1
    output_toks: AtLeast1
    arrival_time: _Finite
    queued_ts: _Finite
    first_token_ts: _Finite
    last_token_ts: _Finite


class _Tick(msgspec.Struct):
    """A line of a timeseries.csv."""

    t: float
    running: float
    waiting: float
    kv_cache_pct: float


class _Meta(msgspec.Struct):
    """The fields of a meta.json that are read."""

    model: Any = None
    vllm_version: Any = None
    engine_kwargs: dict[str, Any] | None = None
    kv_cache: dict[str, Any] | None = None
    hardware: dict[str, Any] | None = None
    resolved_config: dict[str, Any] | None = None


class _BenchServe(msgspec.Struct):
    """The fields of a result of `vllm bench serve` that are read."""

    input_lens: list[int] = []
    output_lens: list[int] = []
    ttfts: list[float] = []
    itls: list[list[float]] = []
    start_times: list[float] | None = None
    max_concurrency: int | None = None
    request_rate: Any = None
    model_id: str | None = None
    model: str | None = None


def read_run(path: str | Path) -> RecordedRun:
    """Read a folder with requests.jsonl and meta.json, or a file of `vllm bench serve`. Raises BadRun with file and row, and OSError."""
    path = Path(path)
    return _of_folder(path) if path.is_dir() else _of_bench_serve(path)


def _of_folder(folder: Path) -> RecordedRun:
    path = folder / "requests.jsonl"
    if not path.exists():
        raise BadRun(folder, None, "there is no requests.jsonl; a recorded run has one, with a meta.json beside it")
    rows = [_row(line) for line in json_lines(path, bad_run)]
    if not rows:
        raise BadRun(path, None, "it has no requests")
    table = np.array([msgspec.structs.astuple(row) for row in rows])
    table = table[table[:, 2].argsort(kind="stable")]
    inputs, outputs, arrival, queued, first, last = table.T
    # Sender and engine have a clock each. The request that was taken in fastest is assumed to have been taken in at once.
    offset = float((queued - arrival).min()) + arrival[0]
    return RecordedRun(
        name=folder.resolve().name,
        setup=_setup(folder / "meta.json"),
        arrival=arrival - arrival[0],
        queued=queued - offset,
        first=first - offset,
        last=last - offset,
        prompt_tokens=inputs.astype(np.int64),
        output_tokens=outputs.astype(np.int64),
        series=_series(folder / "timeseries.csv"),
    )


def _row(line: Line) -> _Request:
    row = line.read(_Request)
    queued, first, last = row.queued_ts, row.first_token_ts, row.last_token_ts
    if not queued <= first <= last:
        raise line.error(None, f"queued at {queued:g}, first token at {first:g}, last at {last:g}: they have to rise")
    if last - queued > 1e6:
        raise line.error(None, f"{last - queued:,.0f} s from queue to last token; times are in seconds")
    return row


def bad_run(path: Path, row: int | None, field: str | int | None, problem: str) -> BadRun:
    """Return the error for a file of a run."""
    return BadRun(path, row, f"{field}: {problem}" if isinstance(field, str) else problem)


def _setup(path: Path) -> RunSetup:
    if not path.exists():
        return RunSetup()
    meta = json_object(path, None, path.read_text(errors="replace"), bad_run).read(_Meta)
    own = meta.engine_kwargs or {}
    parts = [part for part in (meta.resolved_config or {}).values() if isinstance(part, dict)]
    # The requested value counts before the engine's resolved one.
    asked = (*parts, meta.kv_cache or {}, own, {"model": meta.model})
    given = {name: value for part in asked for name, value in part.items() if value is not None}
    unknown = fields_unknown(own)
    if given.get("enable_expert_parallel") and (given.get("tensor_parallel_size") or 1) > 1:
        unknown.append("that experts lie on devices whole; they are counted as if each device had an even part of all")
    setup = {
        "engine_version": meta.vllm_version,
        "device_name": (meta.hardware or {}).get("device_name"),
        **fields_read(given),
        "refused": fields_refused(given),
        "not_modelled": [f"not modelled: {each}" for each in unknown],
    }
    return Line(path, None, setup, bad_run).read(RunSetup)


def _series(path: Path) -> Series | None:
    if not path.exists():
        return None
    ticks = [line.read(_Tick) for line in csv_lines(path, bad_run, _Tick.__struct_fields__)]
    if not ticks:
        return None
    t, running, waiting, percent = np.array([msgspec.structs.astuple(tick) for tick in ticks]).T
    return Series(t, running, waiting, percent / 100)


def _of_bench_serve(path: Path) -> RecordedRun:
    found = json_object(path, None, path.read_text(errors="replace"), bad_run).read(_BenchServe)
    columns = ("input_lens", "output_lens", "ttfts", "itls")
    missing = [name for name in columns if not getattr(found, name)]
    if missing:
        raise BadRun(path, None, f"it has no {missing[0]}; `vllm bench serve` writes them with --save-detailed")
    inputs, outputs, ttfts, itls = (getattr(found, name) for name in columns)
    clients, starts = found.max_concurrency, found.start_times
    if starts is None and clients is None:
        if str(found.request_rate) != "inf":
            raise BadRun(
                path, None, "it has neither start_times nor max_concurrency; when its requests came is not known"
            )
        starts = [0.0] * len(inputs)
    counts = [len(each) for each in (inputs, outputs, ttfts, itls, starts or inputs)]
    if len(set(counts)) > 1:
        names = ", ".join((*columns, "start_times"))
        raise BadRun(path, None, f"{names} have {', '.join(map(str, counts))} entries; each has one a request")
    arrival = np.zeros(len(inputs)) if starts is None else np.array(starts, np.float64)
    order = arrival.argsort(kind="stable")
    order = order[np.array(outputs)[order] > 0]
    if not len(order):
        raise BadRun(path, None, "none of its requests has a token")
    first = arrival + np.array(ttfts, np.float64)
    last = first + np.array([sum(each) for each in itls])
    begin = arrival[order].min()
    return RecordedRun(
        name=path.stem,
        setup=RunSetup(model=found.model_id or found.model),
        arrival=arrival[order] - begin,
        queued=arrival[order] - begin,
        first=first[order] - begin,
        last=last[order] - begin,
        prompt_tokens=np.array(inputs, np.int64)[order],
        output_tokens=np.array(outputs, np.int64)[order],
        clients=clients if starts is None else None,
    )


READ = {
    "model": ("model",),
    "dtype": ("dtype",),
    "kv_dtype": ("kv_cache_dtype",),
    "quantization": ("quantization",),
    "tensor_parallel": ("tensor_parallel_size",),
    "data_parallel": ("data_parallel_size",),
    "max_tokens_per_step": ("max_num_batched_tokens",),
    "max_sequences": ("max_num_seqs",),
    "max_model_len": ("max_model_len",),
    "num_blocks": ("num_gpu_blocks_override", "num_gpu_blocks"),
    "block_size": ("block_size",),
    "prefix_caching": ("enable_prefix_caching",),
    "memory_share": ("gpu_memory_utilization",),
    "runs_ahead": ("async_scheduling",),
}
"""By field of a `RunSetup`, vLLM's fields, of which the first that is set counts. `enable_expert_parallel` is read, too."""
_NONE = (
    "speculative_config", "speculative_model", "num_speculative_tokens", "enable_lora", "lora_config",
    "cpu_offload_gb", "kv_transfer_config", "kv_offloading_size", "long_prefill_token_threshold",
    "disable_hybrid_kv_cache_manager", "is_encoder_decoder",
)  # fmt: skip
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NONE, ()),
    "pipeline_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "enable_chunked_prefill": (True,),
    "policy": ("fcfs",),
    "scheduling_policy": ("fcfs",),
    "max_num_partial_prefills": (1,),
    "max_long_partial_prefills": (1,),
}
"""Refused with any value but these, none, 0 and false; `enable_chunked_prefill` is refused if false."""
HARMLESS = {
    "seed", "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "trust_remote_code",
    "download_dir", "load_format", "revision", "code_revision", "served_model_name", "disable_log_stats",
    "disable_log_requests", "enable_log_requests", "generation_config", "override_generation_config", "hf_token",
    "hf_config_path", "config_format", "model_impl", "runner", "convert", "task", "max_logprobs",
    "distributed_executor_backend", "worker_cls", "worker_extension_cls", "swap_space", "max_seq_len_to_capture",
    "data_parallel_backend", "data_parallel_address", "data_parallel_rpc_port", "data_parallel_rank",
    "data_parallel_size_local", "data_parallel_start_rank", "api_server_count", "show_hidden_metrics_for_version",
    "otlp_traces_endpoint", "collect_detailed_traces", "limit_mm_per_prompt", "allowed_local_media_path",
    "use_tqdm_on_load",
}  # fmt: skip
"""Fields that change neither decisions nor a step's work."""


def fields_read(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `RunSetup` that are given."""
    found = ((field, [given[name] for name in names if given.get(name, "") != ""]) for field, names in READ.items())
    return {field: next(filter(None, values), values[0]) for field, values in found if values}


def fields_refused(given: dict[str, Any]) -> list[str]:
    """Return the fields that change the meaning of a run and are not modelled, with their values."""
    set_ = {name: value for name, value in given.items() if value or (name, value) == ("enable_chunked_prefill", False)}
    return [
        f"{name} = {set_[name]!r}"
        for name, allowed in WITHOUT_EFFECT.items()
        if name in set_ and set_[name] not in allowed
    ]


def fields_unknown(given: dict[str, Any]) -> list[str]:
    """Return the fields that are set and whose effect is not known, with their values."""
    known = {*chain(*READ.values()), "enable_expert_parallel", *WITHOUT_EFFECT, *HARMLESS}
    return [f"{name} = {value!r}" for name, value in given.items() if value and name not in known]
