"""The costs of copying a block and computing a token on this machine, timed once, before the memory is used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paged.attention import StepTokens
from paged.block_manager import Moves
from paged.errors import InvalidConfig
from paged.model.capacity import plan_of, trial_step, trial_tables
from paged.model.runner import Runner
from paged.scheduler import Costs

_TOKENS = 256
_BLOCKS = 64


def measured_costs(runner: Runner, clock: Callable[[], float]) -> Costs:
    """Return the seconds to copy a block from the host, and to compute a token of a prompt of up to 256. Without host blocks a copy has its default price.

    Writes to blocks of both tiers. What attention adds in long contexts is not timed: `attention_knee` is the default. Raises InvalidConfig for a
    pool that does not hold one token.
    """
    pool, step = runner.pool, _prompt_step(runner)
    num_tokens = step.num_tokens
    rising = step.positions
    ids = (rising % runner.model.vocabulary_size).astype(np.int32)
    is_sampled = rising == num_tokens - 1
    seconds = _second_time(runner, clock, lambda: runner.forward(step, ids, is_sampled))
    num_blocks = min(_BLOCKS, pool.num_blocks, pool.num_host_blocks)
    if not num_blocks:
        return Costs(seconds_per_token=seconds / num_tokens)
    blocks = np.arange(num_blocks, dtype=np.int32)
    moves = Moves(host_to_device=np.stack([blocks, blocks], 1))
    copied = _second_time(runner, clock, lambda: runner.copy(moves))
    return Costs(seconds_per_swapped_block=copied / num_blocks, seconds_per_token=seconds / num_tokens)


def _prompt_step(runner: Runner) -> StepTokens:
    """Return a step of the first tokens of one sequence: 256, or fewer where the pool does not hold as many."""
    pool, size, num_tokens = runner.pool, runner.pool.block_size, _TOKENS
    if pool.is_side_by_side:
        rising = np.arange(min(num_tokens, pool.num_blocks * size))
        ends, tables = np.array([len(rising)]), np.arange(-(-len(rising) // size), dtype=np.int32)[None]
        return StepTokens(rising, rising, np.append(0, ends), ends, tables, size)
    plan = plan_of(runner.model, block_size=size, kv_dtype=pool.kv_dtype)
    while (found := trial_tables(plan, 1, num_tokens))[0] > pool.num_blocks:
        if num_tokens == 1:
            raise InvalidConfig(
                f'costs="measured" computes a token, which takes {found[0]} blocks; there are {pool.num_blocks}. Raise num_blocks to {found[0]}.'
            )
        num_tokens //= 2
    ends = np.array([num_tokens])
    return trial_step(pool, np.arange(num_tokens), np.append(0, ends), ends, found[1])


def _second_time(runner: Runner, clock: Callable[[], float], work: Callable[[], object]) -> float:
    """Return the seconds of the second call: the first one pays for what is made once."""
    began = 0.0
    for _ in range(2):
        began = clock()
        work()
        if runner.model.device.type == "cuda":
            torch.cuda.synchronize()
    return clock() - began
