"""What copying a block and computing a token cost on this machine, timed once, before anybody uses the memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paged.attention import StepTokens
from paged.block_manager import Moves
from paged.model.runner import Runner
from paged.scheduler import Costs

_TOKENS = 256
_BLOCKS = 64


def measured_costs(runner: Runner, clock: Callable[[], float]) -> Costs:
    """Seconds to copy a block from the host, and to compute a token of a prompt of up to 256. Without a host the usual price of a copy.

    Writes to blocks of both tiers. What attention adds in long contexts is not timed: the usual `attention_knee`.
    """
    pool, size = runner.pool, runner.pool.block_size
    num_tokens = min(_TOKENS, pool.num_blocks * size)
    rising = np.arange(num_tokens)
    step = StepTokens(
        positions=rising,
        slot_mapping=rising,
        query_start_loc=np.array([0, num_tokens]),
        seq_lens=np.array([num_tokens]),
        block_tables=np.arange(-(-num_tokens // size), dtype=np.int32)[None],
        block_size=size,
    )
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


def _second_time(runner: Runner, clock: Callable[[], float], work: Callable[[], object]) -> float:
    """Seconds of the second call: the first one pays for what is made once."""
    began = 0.0
    for _ in range(2):
        began = clock()
        work()
        if runner.model.device.type == "cuda":
            torch.cuda.synchronize()
    return clock() - began
