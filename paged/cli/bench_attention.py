"""`paged bench attention`: backends side by side, over the same blocks."""

from __future__ import annotations

from itertools import groupby, product
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from paged.attention.kv_dtypes import AUTO, KV_DTYPES
from paged.base.budget import short
from paged.base.extras import import_with_extra
from paged.base.words import counted
from paged.cli.options import Json, count, listed
from paged.cli.show import counting, figures, loading, print_json, say, table
from paged.errors import InvalidConfig

if TYPE_CHECKING:
    from paged.study.bench.attention import AttentionTimes, Load

_MOST_NEW = 256
_STEPS = ("decode", "prefill", "mixed")
_STEP, _TIMING = "What is computed", "How it is timed"


def attention(
    backends: Annotated[str | None, Option(help="Backends, with commas between: native, torch_gather, reference.", show_default="all that can run here; reference is too slow to wait for")] = None,
    shapes: Annotated[str, Option(metavar="HEADS/KV/SIZE[,…]", help="Query heads, heads of K and V, size of a head.", rich_help_panel=_STEP)] = "9/3/64,14/2/64,32/8/128",
    block_sizes: Annotated[str, Option(metavar="N[,…]", help="Tokens a block.", rich_help_panel=_STEP)] = "16,64",
    dtype: Annotated[Literal["float32", "bfloat16"], Option(help="Dtype of queries, K and V.", rich_help_panel=_STEP)] = "float32",
    kv_cache_dtype: Annotated[str, Option(help="Storage of K and V: auto, as --dtype; int8 or int4.", rich_help_panel=_STEP)] = AUTO,
    sequences: Annotated[int, Option(min=1, help="Sequences of a decode.", rich_help_panel=_STEP)] = 64,
    context: Annotated[int, Option(min=1, help="Tokens of each sequence.", rich_help_panel=_STEP)] = 512,
    prompt: Annotated[int | None, Option(min=1, help="New tokens among these: for each of 4 sequences in a prefill, for one in a mixed step.", show_default="256, or all", rich_help_panel=_STEP)] = None,
    fast: Annotated[bool, Option("--fast", help="Run backends in the mode in which answers may depend on the batch.")] = False,
    rounds: Annotated[int, Option(min=1, help="Rounds of timing.", rich_help_panel=_TIMING)] = 7,
    threads: Annotated[int | None, Option(min=1, help="Torch's threads.", show_default="torch's own choice", rich_help_panel=_TIMING)] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Time one layer's attention by every backend that runs here: a decode, a prefill, and a step that mixes both.

    Blocks lie in random order in a pool larger than a processor's cache. A decode is shown in bytes of K and V a second, and their share of
    what a copy reads and writes here; a prefill in operations a second. Backends take turns; a figure is the median of its rounds.

    Example: `paged bench attention --shapes 9/3/64 --block-sizes 16 --dtype bfloat16`
    """
    if kv_cache_dtype not in KV_DTYPES:
        raise InvalidConfig(f'--kv-cache-dtype is "{kv_cache_dtype}"; it takes {", ".join(KV_DTYPES)}')
    pairs = [_numbers(part) for part in shapes.split(",")]
    sizes = listed(block_sizes, "--block-sizes", count)
    names = None if backends is None else [name.strip() for name in backends.split(",")]
    with loading("torch and the backends"):
        torch = import_with_extra("torch", "bench")
        from paged.model.limits import copy_rate
        from paged.study.bench.attention import HeadShape, Load, attention_times, chosen_backends

    if threads is not None:
        torch.set_num_threads(threads)
    new = min(_MOST_NEW, context) if prompt is None else prompt
    load = Load(dtype=dtype, kv_dtype=kv_cache_dtype, sequences=sequences, context=context, prompt=new)
    kind = getattr(torch, dtype)
    cases = [(HeadShape(*numbers), size) for numbers, size in product(pairs, sizes)]
    # Refuse any wrong one before one is timed.
    chosen = [
        chosen_backends(names, shape, size, kind, kv_dtype=kv_cache_dtype, invariant=not fast) for shape, size in cases
    ]
    results: list[AttentionTimes] = []
    num_ended = 0
    try:
        with counting("rounds", rounds * len(cases)) as advance:
            rate = copy_rate()
            for (shape, size), ways in zip(cases, chosen, strict=True):
                results += attention_times(
                    *(ways, shape, size, load, kind), copy_bytes_per_s=rate, rounds=rounds, after_round=advance
                )
                num_ended += 1
    except KeyboardInterrupt:
        if results:
            _show(results, load, rounds, not fast, json)
        say(f"interrupted; {num_ended} of {counted(len(cases), 'measurement')} had ended")
        raise
    _show(results, load, rounds, not fast, json)


def _numbers(part: str) -> tuple[int, int, int]:
    try:
        heads, kv_heads, head_size = map(count, part.split("/"))
    except ValueError:
        raise InvalidConfig(
            f'--shapes takes query heads/heads of K and V/size of a head, such as 9/3/64, with commas between; got "{part.strip()}"'
        ) from None
    return heads, kv_heads, head_size


def _show(results: list[AttentionTimes], load: Load, rounds: int, invariant: bool, json: bool) -> None:
    if json:
        print_json(results)
        return
    columns = ["heads", "block", "step", "backend", "ms", "range", "rate"]
    ordered = [
        (result, step)
        for _, group in groupby(results, lambda result: (result.shape, result.block_size))
        for step, result in product(_STEPS, list(group))
    ]
    title = "attention of one layer; in a decode also the share of a copy's rate"
    table(title, columns, [_cells(*each) for each in ordered], right=(1, 4, 5, 6))
    first = results[0]
    figures(
        "what was timed",
        [
            (
                "steps",
                f"{load.dtype}{_kept(load)}, {load.sequences:,} sequences of {load.context:,} tokens, {load.prompt:,} of them new in prompts",
            ),
            ("mode", "batch-invariant" if invariant else "fast"),
            ("rounds", f"{rounds}, on {counted(first.threads, 'thread')}; the median, and the least and the most"),
            ("a copy here", f"{first.copy_bytes_per_s / 1e9:.1f} GB/s, read and written"),
        ],
    )


def _kept(load: Load) -> str:
    return "" if load.kv_dtype == AUTO else f", K and V in {load.kv_dtype}"


def _cells(result: AttentionTimes, step: str) -> list[str]:
    milliseconds, rate = {
        "decode": (
            result.decode_ms,
            f"{result.decode_bytes_per_s / 1e9:,.1f} GB/s, {result.share_of_copy:.0%}",
        ),
        "prefill": (result.prefill_ms, f"{result.prefill_flops_per_s / 1e9:,.0f} GFLOP/s"),
        "mixed": (result.mixed_ms, ""),
    }[step]
    ends = f"{short(milliseconds.least)}–{short(milliseconds.most)}"
    return [str(result.shape), f"{result.block_size:,}", step, result.backend, short(milliseconds.median), ends, rate]
