"""The host's time for a steady decode step: `schedule` and `update` while every row decodes one token.

Figures are over windows of 16 steps, because rows that were admitted together all need a new block in the same step, once in 16.
"""

import gc
import time

import msgspec
import numpy as np

from paged import Batch, BlockManager, Request, Scheduler
from paged.errors import BenchmarkFailed
from paged.study.limits import at_least

BLOCK_SIZE = 16
BUDGET = 8192
PREFILL_STEPS = 64
WINDOW = 16
WARM_STEPS = 32
SPARE_TOKENS = 600
SAMPLED_TOKEN = 7
TOKEN_IDS = (10, 32_000)


class DecodeStep(msgspec.Struct, frozen=True):
    """Microseconds of CPU time a step. `us_per_step` is the median over windows of a window's mean step; `us_min` and `us_max` are windows, too."""

    rows: int
    caching: bool
    context: int
    holes: int
    block_size: int
    steps: int
    us_per_step: float
    us_min: float
    us_max: float
    us_schedule: float
    us_update: float
    us_per_row: float


def decode_step(
    rows: int, *, caching: bool, context: int = 256, holes: int = 0, steps: int | None = None
) -> DecodeStep:
    """Time a decode step of `rows` sequences with prompts of `context` tokens.

    `holes` more sequences start among them and are aborted before the timing, evenly spread, so that there are gaps between live rows.
    `steps` are timed, rounded down to whole windows; by default 2**18 / rows, within 160 and 2048. Raises InvalidConfig for sizes below their least.
    """
    for name, value, least in (("rows", rows, 1), ("context", context, 1), ("holes", holes, 0)):
        at_least(name, value, least)
    steps = at_least("steps", min(max(2**18 // rows, 160), 2048) if steps is None else steps, WINDOW)
    scheduler = _decoding(rows, caching, context, holes, steps)
    for _ in range(WARM_STEPS):
        _step(scheduler, rows)
    gc.collect()
    timings = np.array([_step(scheduler, rows) for _ in range(steps // WINDOW * WINDOW)]) * 1e6
    schedule_us, update_us = timings.reshape(-1, WINDOW, 2).mean(axis=1).T
    window_us = schedule_us + update_us
    median = float(np.median(window_us))
    return DecodeStep(
        rows=rows,
        caching=caching,
        context=context,
        holes=holes,
        block_size=BLOCK_SIZE,
        steps=len(timings),
        us_per_step=median,
        us_min=float(window_us.min()),
        us_max=float(window_us.max()),
        us_schedule=float(np.median(schedule_us)),
        us_update=float(np.median(update_us)),
        us_per_row=median / rows,
    )


def _decoding(rows: int, caching: bool, context: int, holes: int, steps: int) -> Scheduler:
    """Return a scheduler whose `rows` sequences have computed their prompts, with enough memory for every step to come."""
    num_sequences = rows + holes
    # Long prompts get a larger budget: else the first sequences would decode many steps before the last has computed its prompt.
    budget = max(BUDGET, 2 * num_sequences, num_sequences * context // PREFILL_STEPS if context > 256 else 0)
    # Until then the first ones decode, with up to half the budget, and need blocks for those tokens, too.
    prefill_steps = -(-num_sequences * (context + 1) // budget) * 2
    # No request ends before the timing does, and the pool holds what all of them declare: else the policy holds some back.
    max_tokens = steps + WARM_STEPS + SPARE_TOKENS + prefill_steps
    blocks_a_sequence = -(-(context + max_tokens) // BLOCK_SIZE)
    # A policy's watermark, a few percent of the pool, must not keep the last sequences waiting.
    num_blocks = num_sequences * blocks_a_sequence * 11 // 10 + 64
    manager = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=caching)
    scheduler = Scheduler(manager, policy="paged", max_tokens_per_step=budget, max_sequences=num_sequences)
    random = np.random.default_rng(0)
    for number in range(num_sequences):
        prompt = random.integers(*TOKEN_IDS, context, dtype=np.int32)
        scheduler.add(Request(id=str(number), prompt=prompt, max_tokens=max_tokens))
    for _ in range(SPARE_TOKENS + prefill_steps):
        batch = scheduler.schedule(0.0)
        scheduler.update(batch, _sampled(int(np.count_nonzero(batch.samples))), now=0.0)
        if len(batch.rows) == batch.num_scheduled_tokens == num_sequences:
            break
    else:
        raise BenchmarkFailed(
            f"{scheduler.counts()['running']} of {num_sequences} sequences run; all of them should decode"
        )
    for hole in range(holes):
        scheduler.abort(str(hole * num_sequences // holes + num_sequences // (2 * holes)))
    return scheduler


def must_decode(batch: Batch, rows: int) -> None:
    """Raise BenchmarkFailed unless the step decodes one token of each of so many rows."""
    if not len(batch.rows) == batch.num_scheduled_tokens == rows:
        raise BenchmarkFailed(
            f"{batch.num_scheduled_tokens} tokens of {len(batch.rows)} rows in a step that should decode {rows}"
        )


def _step(scheduler: Scheduler, rows: int) -> tuple[float, float]:
    """One step: CPU seconds of `schedule` and of `update`."""
    clock = time.thread_time
    started = clock()
    batch = scheduler.schedule(0.0)
    scheduled = clock()
    must_decode(batch, rows)
    tokens = _sampled(rows)
    sampled = clock()
    scheduler.update(batch, tokens, now=0.0)
    return scheduled - started, clock() - sampled


def _sampled(count: int) -> np.ndarray:
    return np.full(count, SAMPLED_TOKEN, np.int32)
