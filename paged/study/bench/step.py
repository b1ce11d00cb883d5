"""The time of a decode step of the engine, part by part.

    | schedule | inputs | forward pass                    | sampling | update | outputs |      host: all but the forward pass
                        | attention | products | the rest |

The parts are timed within steps of the engine. A decoder that runs as one call into C shows only the whole pass there. So
the last step's pass is repeated: attention's share is the time that the call saves without it, products are timed alone,
and the rest is what remains of the pass.
"""

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from paged import Batch, SamplingParams
from paged.attention import StepTokens
from paged.attention.kv_dtypes import AUTO
from paged.attention.native.backend import ELEMENTS
from paged.engine import executor
from paged.engine.engine import Engine
from paged.engine.step_inputs import StepInputs
from paged.errors import BenchmarkFailed, BuildFailed, InvalidConfig
from paged.model.loading import LoadedModel
from paged.model.native.coded import CCodes, QuantisedLinear, coded_library
from paged.model.native.large_pages import aligned
from paged.model.native.packed import NativeLinear, PackedLinear, Product, model_library
from paged.study.bench.decode import must_decode
from paged.study.bench.engine import Serving, precision_of
from paged.study.bench.workloads import Measured
from paged.study.limits import at_least

_WARM_STEPS = 8
# Repetitions of the last step's pass.
_ROUNDS = 15
_LEAST_BUDGET = 2048
_BLOCK_SIZE = 16
# The function of the model's library that runs a decoder's pass.
_CALL = "paged_decoder_forward"
_SAME_INPUTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "both"),
}


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of the wall clock, over the steps.

    context         prompt tokens of each row
    inputs_us       the worker's part before and after the forward pass
    update_us       the scheduler's update; outputs_us: all that is left, such as text, results and the engine's own accounts
    attention_us    of all layers, products_us of all linear layers, and rest_us: parts of the median forward_us, by their shares in the
                    repeated pass of the last step; None if the pass is not one call
    host_share      of the median step, all but the median forward pass
    """

    model: str
    dtype: str
    backend: str
    batch_invariant: bool
    threads: int
    rows: int
    context: int
    block_size: int
    steps: int
    step_us: Measured
    schedule_us: Measured
    inputs_us: Measured
    forward_us: Measured
    attention_us: float | None
    products_us: float | None
    rest_us: float | None
    sampling_us: Measured
    update_us: Measured
    outputs_us: Measured
    host_share: float


def step_parts(
    model: LoadedModel,
    *,
    name: str,
    rows: int = 64,
    context: int = 256,
    steps: int = 64,
    block_size: int = _BLOCK_SIZE,
    backend: str = "auto",
    batch_invariant: bool = True,
    kv_cache_dtype: str = AUTO,
) -> StepParts:
    """Time steps in which `rows` sequences with prompts of `context` tokens decode one token each; `name` is the model's name in the result.

    Raises InvalidConfig for sizes below 1 and for sequences longer than the model takes, BenchmarkFailed, and what Engine raises.
    """
    for size, value in (("rows", rows), ("context", context), ("steps", steps), ("block_size", block_size)):
        at_least(size, value, 1)
    serving = Serving(
        num_blocks=1,
        block_size=block_size,
        max_sequences=rows,
        backend=backend,
        batch_invariant=batch_invariant,
        kv_cache_dtype=kv_cache_dtype,
    )
    engine = _decoding(model, context, steps, serving)
    batches: list[Batch] = []
    engine.on_batch = batches.append
    timed: list[dict[str, float]] = []
    is_one_call = False
    for number in range(_WARM_STEPS + steps):
        batches.clear()
        watch = _Stopwatch()
        with _watched(engine, watch):
            began = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - began
        (batch,) = batches
        must_decode(batch, rows)
        is_one_call = "call" in watch.seconds
        if number >= _WARM_STEPS:
            timed.append(_parts_of(watch.seconds, seconds))
    found: dict[str, Any] = {f"{part}_us": Measured.of([each[part] * 1e6 for each in timed]) for part in timed[0]}
    step, forward = found["step_us"].median, found["forward_us"].median
    within: dict[str, Any] = dict.fromkeys(("attention_us", "products_us", "rest_us"))
    if is_one_call:
        attention, products = _Again(engine, batches[-1]).shares()
        shares = (attention, products, 1 - attention - products)
        within = {part: share * forward for part, share in zip(within, shares)}
    with engine.runner.threads():
        threads = torch.get_num_threads()
    return StepParts(
        model=name,
        dtype=precision_of(engine),
        backend=engine.runner.backend.name,
        batch_invariant=batch_invariant,
        threads=threads,
        rows=rows,
        context=context,
        block_size=block_size,
        steps=steps,
        host_share=1 - forward / step,
        **found,
        **within,
    )


def _decoding(model: LoadedModel, context: int, steps: int, serving: Serving) -> Engine:
    """Return an engine with the options of `serving` whose rows have computed their prompts, with enough memory for every step to come."""
    rows, block_size = serving.max_sequences, serving.block_size
    budget = max(_LEAST_BUDGET, 2 * rows)
    # The first rows decode until all have computed their prompts.
    prefill_steps = -(-rows * context // (budget - rows)) + 1
    max_tokens = prefill_steps + _WARM_STEPS + steps + 1
    longest = context + max_tokens
    if model.max_length is not None and longest > model.max_length:
        raise InvalidConfig(
            f"prompts of {context:,} tokens and {max_tokens:,} steps make sequences of {longest:,}; the model takes {model.max_length:,}. "
            "Lower context, rows or steps"
        )
    # A policy's watermark, a few percent of the pool, must not keep the last ones waiting.
    num_blocks = rows * -(-longest // block_size) * 11 // 10 + 64
    engine = msgspec.structs.replace(serving, num_blocks=num_blocks, max_tokens_per_step=budget).engine(model)
    random = np.random.default_rng(0)
    for number in range(rows):
        prompt = random.integers(0, model.vocabulary_size, context).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), id=str(number))
    batches: list[Batch] = []
    engine.on_batch = batches.append
    while not batches or batches[-1].num_scheduled_tokens != rows or len(batches[-1].rows) != rows:
        if len(batches) > prefill_steps:
            raise BenchmarkFailed(
                f"{engine.scheduler.counts()['running']} of {rows} sequences run; all of them should decode"
            )
        engine.step()
    return engine


class _Stopwatch:
    """Seconds of calls, added up by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def around(self, owner: Any, method: str, name: str) -> Iterator[None]:
        """Time the calls of this method of one object within the block."""
        call, is_own = getattr(owner, method), method in vars(owner)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        setattr(owner, method, timed)
        try:
            yield
        finally:
            if is_own:
                setattr(owner, method, call)
            else:
                delattr(owner, method)


@contextmanager
def _watched(engine: Engine, watch: _Stopwatch) -> Iterator[None]:
    """Time the parts of the engine's steps. A forward pass is one call into C, or a call of the module for each tile."""
    watched = [
        (engine.scheduler, "schedule", "schedule"),
        (engine.worker, "begin", "worker"),
        (engine.worker, "ready", "worker"),
        (engine.worker, "logits", "worker"),
        (engine.model.module, "forward", "module"),
        (executor, "drawn", "sampling"),
        (engine.scheduler, "update", "update"),
    ]
    with suppress(BuildFailed):
        watched.append((model_library(), _CALL, "call"))
    with ExitStack() as stack:
        for owner, method, name in watched:
            stack.enter_context(watch.around(owner, method, name))
        yield


def _parts_of(seconds: dict[str, float], step: float) -> dict[str, float]:
    forward = seconds.get("call", 0.0) + seconds.get("module", 0.0)
    named = {
        "schedule": seconds["schedule"],
        "inputs": seconds["worker"] - forward,
        "forward": forward,
        "sampling": seconds["sampling"],
        "update": seconds["update"],
    }
    return {"step": step, **named, "outputs": step - sum(named.values())}


class _Again:
    """The repeated forward pass of a batch that has run: whole, and without attention; and its products alone, of all rows and of none. The
    differences cancel the cost of a call."""

    def __init__(self, engine: Engine, batch: Batch) -> None:
        self._runner = engine.runner
        self._ids = batch.token_ids
        self._step = engine.worker.ready(StepInputs(engine.manager.block_size).of(batch)).tokens
        self._no_attention = replace(
            self._step,
            query_start_loc=np.zeros(1, np.int64),
            seq_lens=np.zeros(0, np.int64),
            block_tables=self._step.block_tables[:0],
        )
        rows, drawn = self._step.num_tokens, torch.Generator().manual_seed(0)
        together = _together(engine.model.module)
        self._inputs = {
            depth: torch.randn(rows, depth, generator=drawn).to(engine.model.dtype)
            for depth in {linears[0].in_features for linears in together}
        }
        outs = max(each.out_features for linears in together for each in linears)
        self._to = torch.empty(max(map(len, together)), rows * outs)
        self._calls = [_Call.of(linears, self._to) for linears in together]
        self._work = aligned(max((call.room(rows) for call in self._calls), default=0))

    def shares(self) -> tuple[float, float]:
        """Return the shares of attention and of products in a pass: medians over rounds that time all four in turn."""
        attention, products = [], []
        with self._runner.threads():
            for number in range(1 + _ROUNDS):
                whole, without = self._pass(self._step), self._pass(self._no_attention)
                multiplied, nothing = self._products(self._step.num_tokens), self._products(0)
                # The first round pays for what is made once.
                if number:
                    attention.append((whole - without) / whole)
                    products.append((multiplied - nothing) / whole)
        return median(attention), median(products)

    def _pass(self, step: StepTokens) -> float:
        watch = _Stopwatch()
        with watch.around(model_library(), _CALL, "call"):
            self._runner.forward(step, self._ids, np.ones(len(self._ids), np.bool_))
        return watch.seconds["call"]

    def _products(self, rows: int) -> float:
        multiply, work, seconds = coded_library().paged_mixed_products, self._work.data_ptr(), 0.0
        for depth, products in self._calls:
            x, count = self._inputs[depth], len(products)
            element, address = ELEMENTS[x.dtype], x.data_ptr()
            began = time.perf_counter()
            multiply(address, depth, rows, depth, element, products, count, work)
            seconds += time.perf_counter() - began
        return seconds


class _Call(NamedTuple):
    """A call into C that computes products of the same inputs, as decoder.c does."""

    depth: int
    products: Any

    @classmethod
    def of(cls, linears: Sequence[NativeLinear], to: torch.Tensor) -> "_Call":
        """Return the call for these linear layers, each with its own row of `to`."""
        products = []
        for each, row in zip(linears, to):
            outs = each.out_features
            product = Product(to=row.data_ptr(), outs=outs, to_stride=outs)
            if isinstance(each, QuantisedLinear):
                product.packed, product.codes = each.packed.codes.data_ptr(), ctypes.addressof(each.packed.c)
            else:
                assert isinstance(each, PackedLinear), "there are two kinds"
                product.packed = each.packed.data_ptr()
            products.append(product)
        return cls(linears[0].in_features, (Product * len(products))(*products))

    def room(self, rows: int) -> int:
        """Return the bytes of workspace that its products with codes need."""
        each = (product.codes for product in self.products if product.codes)
        room = coded_library().paged_codes_room
        return max((room(ctypes.byref(CCodes.from_address(codes)), rows, self.depth) for codes in each), default=0)


def _together(module: Any) -> list[list[NativeLinear]]:
    """Return the linear layers of a module that runs as one call, grouped by the inputs that they share."""
    found: dict[tuple[str, ...], list[NativeLinear]] = {}
    for path, each in module.named_modules():
        if isinstance(each, NativeLinear):
            parent, _, name = path.rpartition(".")
            found.setdefault((parent, _SAME_INPUTS.get(name, name)), []).append(each)
    return list(found.values())
