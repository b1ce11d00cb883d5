"""A whole serving engine around `BlockManager` and `Scheduler`: numpy instead of a model, so that it runs anywhere.

The stand-in keeps one number where a model keeps K and V: the token mixed with its position. Its next token is a
checksum of the whole context in order, read through the block table, so a wrong table, a lost copy or a missed move
gives another token. It follows the batch alone and knows no request, ref count or policy.
"""

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from paged import BlockManager, Moves, Request, Scheduler

VOCABULARY = 1_009


class StandInEngine:
    """KV memory of two tiers, int64 [blocks, block_size] each, and a forward pass that reads it."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        # A slot that is read before it was written spoils the checksum.
        self.device = np.full((num_blocks, block_size), -1)
        self.host = np.full((host_blocks, block_size), -1)

    def move(self, moves: Moves) -> None:
        """Copy whole blocks, the kinds in this order; int32 [n, 2] a kind: source block, destination block."""
        source, destination = moves.device_to_host.T
        self.host[destination] = self.device[source]
        source, destination = moves.host_to_device.T
        self.device[destination] = self.host[source]
        source, destination = moves.device_to_device.T
        self.device[destination] = self.device[source]

    def forward(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int64],
        slot_mapping: NDArray[np.int64],
        block_tables: NDArray[np.int32],
        rows: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Write the step's tokens into their slots, then give each row its "logits": the next token, int64 [rows]."""
        self.device.reshape(-1)[slot_mapping] = token_ids + positions
        contexts = (self.device[block_tables[row]].reshape(-1)[:length] for row, length in zip(rows, seq_lens))
        return np.array([checksum(context) for context in contexts], dtype=np.int64)

    def sample(self, logits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give one token id for each row that samples, int64 [rows]: the stand-in's logits are the ids."""
        return logits


def checksum(context: NDArray[np.int64]) -> int:
    """The next token, from what the slots of the whole context hold: the order counts, too."""
    return int(context @ np.arange(1, len(context) + 1)) % VOCABULARY


def serve(requests: Iterable[Request], num_blocks: int, host_blocks: int = 0) -> tuple[dict[str, list[int]], Scheduler]:
    """Run the requests to their ends, and return each one's output tokens and the scheduler, for its figures."""
    engine = StandInEngine(num_blocks, 16, host_blocks)
    manager = BlockManager(num_blocks=num_blocks, block_size=16, host_blocks=host_blocks)
    scheduler = Scheduler(manager, policy="paged", max_tokens_per_step=256, max_sequences=64)
    outputs: dict[str, list[int]] = {}
    for request in requests:
        scheduler.add(request, now=time.monotonic())
    while scheduler.has_unfinished:
        batch = scheduler.schedule(now=time.monotonic())
        engine.move(batch.moves)
        logits = engine.forward(
            batch.token_ids, batch.positions, batch.slot_mapping, batch.block_tables, batch.rows, batch.seq_lens
        )
        for output in scheduler.update(batch, engine.sample(logits[batch.samples]), now=time.monotonic()):
            outputs.setdefault(output.id, []).extend(output.token_ids)
    return outputs, scheduler


def conversations(count: int = 48) -> list[Request]:
    """Requests of random length; each begins with one of three long prefixes, as a service's conversations do."""
    random = np.random.default_rng(0)
    prefixes = random.integers(VOCABULARY, size=(3, 100), dtype=np.int32)
    requests = []
    for number in range(count):
        question = random.integers(VOCABULARY, size=random.integers(1, 60), dtype=np.int32)
        prompt = np.concatenate([prefixes[number % 3], question])
        requests.append(Request(id=f"r{number}", prompt=prompt, max_tokens=int(random.integers(20, 120))))
    return requests


def main() -> None:
    """Serve on a pool of 64 blocks, far too small, and print what became of it."""
    outputs, scheduler = serve(conversations(), num_blocks=64, host_blocks=12)
    stats = scheduler.stats()
    print(f"{len(outputs)} requests, {stats.output_tokens} tokens, {stats.steps} steps")
    print(f"prompt tokens from the prefix cache: {stats.hit_tokens} of {stats.prompt_tokens}")
    print(f"preemptions: {stats.preemptions_recompute} by recompute, {stats.preemptions_swap} by swap")


if __name__ == "__main__":
    main()
