"""The batches to time: decoding rows by their number and contexts, chunks by their size, and both together.

    streams  | ================ |   token streams of falling length, computed and cached once a round: prefill in full steps
             | ============ |
             | ======== |
    scene      rows enter on the cached first tokens of their streams, and decode; then newcomers' chunks join them, one a step

So a context is computed once and serves every scene. Each row has its own stream, and so its own blocks: a second row on the
same K and V would find it in the processor's cache.
"""

from itertools import cycle

import msgspec
import numpy as np

from paged.study.limits import at_least

DECODES = 2
"""Decode steps of a scene, after the step in which its rows enter and before its newcomers."""
HELD_OUT = 3
"""One scene in so many is held out."""


class Chunk(msgspec.Struct, frozen=True):
    """A newcomer whose prompt has `cached` cached tokens and `new` ones, which one step computes."""

    cached: int
    new: int


class Scene(msgspec.Struct, frozen=True):
    """Rows that decode, and chunks that join them.

    contexts     cached tokens of each row, a multiple of the block size; row i is on stream i, and its prompt has one token more
    chunks       newcomers, a step each
    is_held_out  the fit leaves its steps out
    """

    contexts: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    is_held_out: bool


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a round: the prefill of all streams, then every scene.

    streams              tokens of each stream, a multiple of the block size
    max_tokens_per_step, max_sequences
                         the least that an engine has to allow
    """

    block_size: int
    max_tokens_per_step: int
    max_sequences: int
    streams: tuple[int, ...]
    scenes: tuple[Scene, ...]

    @property
    def num_blocks(self) -> int:
        """Device blocks that suffice to preempt no request and evict no stream."""
        size = self.block_size
        cached = sum(self.streams) // size
        # A row needs the block of its last prompt token, and the blocks that its outputs go on to.
        per_row = 1 + -(-self.longest_output // size)
        new = -(-self.max_tokens_per_step // size) + 1
        # A policy may keep a share of the pool free: none keeps more than a tenth.
        return (cached + self.max_sequences * per_row + new) * 10 // 9 + 1

    @property
    def longest_output(self) -> int:
        """The most tokens that a row samples in a scene."""
        return 1 + DECODES + max(len(scene.chunks) for scene in self.scenes)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.streams) + max(1 + self.longest_output, self.max_tokens_per_step + 1)


def designed(*, max_sequences: int, max_context: int, max_tokens_per_step: int, block_size: int = 16) -> Design:
    """Design batches of up to `max_sequences` − 1 decoding rows with up to `max_context` cached tokens, and chunks that fill a step's budget.

    Raises InvalidConfig for a block size below 1, fewer than 4 sequences, a context below four blocks, or a budget not above the sequences.
    """
    at_least("block_size", block_size, 1)
    at_least("max_sequences", max_sequences, 4)
    at_least("max_context", max_context, 4 * block_size)
    at_least("max_tokens_per_step", max_tokens_per_step, max_sequences + 1)
    most_rows = max_sequences - 1
    longest = max_context // block_size
    # In a fixed random order, so that a tile of an engine has long contexts and short ones.
    blocks = [max(1, longest * (most_rows - row) // most_rows) for row in range(most_rows)]
    order = np.random.default_rng(0).permutation(most_rows).tolist()
    order.insert(0, order.pop(order.index(0)))
    streams = tuple(blocks[row] * block_size for row in order)
    row_levels = sorted({0, 1, *(max(1, most_rows * eighths // 8) for eighths in (1, 2, 4, 6, 8))})
    context_levels = sorted({max(1, longest * part // 16) * block_size for part in (1, 4, 8, 16)})
    sizes = cycle((16, 4, 2, 1))
    scenes: list[Scene] = []
    # Every other pair of a chessboard, the largest among them, is enough for a fit; and every context without rows.
    pairs = [
        (rows, context)
        for i, rows in enumerate(reversed(row_levels))
        for j, context in enumerate(reversed(context_levels))
        if (i + j) % 2 == 0 or not rows
    ][::-1]
    for i, (rows, context) in enumerate(pairs):
        room = max_tokens_per_step - rows
        other = context_levels[-1 - context_levels.index(context)]
        chunks = tuple(Chunk(cached, max(1, room // next(sizes))) for cached in (context, 0, other))
        contexts = tuple(min(streams[row], context) for row in range(rows))
        # Counted from the end: the largest scene is fitted.
        is_held_out = (len(pairs) - 1 - i) % HELD_OUT == 1
        scenes.append(Scene(contexts, chunks, is_held_out))
    return Design(
        block_size=block_size,
        max_tokens_per_step=max_tokens_per_step,
        max_sequences=max_sequences,
        streams=streams,
        scenes=tuple(scenes),
    )
