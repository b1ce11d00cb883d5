"""What publishing KV events costs an engine's thread: `publish` a step, and how long a summary for a late reader holds a step up.

    python benchmarks/kv_events_cost.py

64 rows decode on a pool that evicts all the time, at a scheduler without a model; `publish` is timed after each step, with one subscriber.
Then a reader asks for all that a pool of 100,000 blocks holds, and a thread that only counts tells how long it was kept from counting.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from itertools import count

import numpy as np
import zmq

from paged import BlockManager, Request, Scheduler
from paged.serving.kv_events import KvEventPublisher
from paged.serving.kv_index import KvIndex
from paged.serving.kv_subscriber import KvSubscriber
from paged.serving.settings import KvEventsConfig

ANY_PORT = "tcp://127.0.0.1:*"


def steps(num_steps: int = 4_000) -> None:
    """Time `publish` after every step of 64 decoding rows."""
    manager = BlockManager(3_000, 16)
    scheduler = Scheduler(manager, max_tokens_per_step=2048, max_sequences=64)
    rng, ids = np.random.default_rng(0), count()
    took: list[tuple[float, float, int]] = []
    publisher = KvEventPublisher(manager, KvEventsConfig(endpoint=ANY_PORT, replay_endpoint=ANY_PORT))
    with closing(publisher), zmq.Context.instance().socket(zmq.SUB) as sub:
        sub.subscribe(b"")
        sub.connect(publisher.endpoint)
        for _ in range(num_steps):
            while scheduler.counts()["waiting"] < 4:
                prompt = rng.integers(0, 30_000, 200).astype(np.int32)
                scheduler.add(Request(id=str(next(ids)), prompt=prompt, max_tokens=int(rng.integers(100, 400))))
            began = time.perf_counter()
            batch = scheduler.schedule()
            scheduler.update(batch, np.full(int(batch.samples.sum()), 7))
            stepped = time.perf_counter()
            publisher.publish(time.time())
            done = time.perf_counter()
            took.append((stepped - began, done - stepped, int(batch.num_tokens.sum())))
            # The forward pass, in which the other thread runs.
            time.sleep(0.001)
    decoding = [(step, publish) for step, publish, tokens in took[500:] if tokens <= 64]
    prefill = [(step, publish) for step, publish, tokens in took[500:] if tokens > 64]
    for name, each in (("decode steps", decoding), ("steps with a prompt", prefill)):
        step, publish = (sorted(column) for column in zip(*each, strict=True))
        print(
            f"{name}: {len(each)}; schedule and update {statistics.median(step) * 1e6:.0f} µs, "
            f"publish {statistics.median(publish) * 1e6:.0f} µs (99th percentile {publish[int(len(publish) * 0.99)] * 1e6:.0f})"
        )


def summary(num_blocks: int = 100_000) -> None:
    """Have a late reader ask for everything, and see what the engine's thread notices."""
    manager = BlockManager(num_blocks, 16)
    tokens = np.random.default_rng(0).integers(0, 30_000, num_blocks * 16).astype(np.int32)
    config = KvEventsConfig(endpoint=ANY_PORT, replay_endpoint=ANY_PORT, buffer_steps=1)
    with closing(KvEventPublisher(manager, config)) as publisher:
        for start in range(0, len(tokens), 1600):
            row = manager.add(tokens[start : start + 1600])
            manager.take_moves()
            manager.allocate([row], [1600])
            manager.confirm()
            manager.free([row])
            publisher.publish(time.time())
        with KvSubscriber(publisher.endpoint, publisher.replay_endpoint) as reader:
            # Asked here, read when it has come.
            dealer = zmq.Context.instance().socket(zmq.DEALER)
            dealer.linger = 0
            dealer.connect(publisher.replay_endpoint)
            for round_number in range(2):
                dealer.send_multipart([b"", (0).to_bytes(8, "big")])
                began = last = time.perf_counter()
                longest = 0.0
                while not dealer.poll(0):
                    now = time.perf_counter()
                    longest, last = max(longest, now - last), now
                size = len(dealer.recv_multipart()[3])
                while dealer.recv_multipart()[3]:
                    pass
                print(
                    f"summary of {num_blocks:,} blocks, {('made', 'kept')[round_number]}: {size / 1e6:.1f} MB "
                    f"after {last - began:.3f} s; a busy thread was held up {longest * 1e3:.1f} ms at most"
                )
            dealer.close()
            began = time.perf_counter()
            index = KvIndex()
            for seq, batch in reader.take(1.0):
                index.apply(seq, batch)
            print(f"a reader has its {len(index.held('GPU')):,} blocks after {time.perf_counter() - began:.3f} s")


if __name__ == "__main__":
    steps()
    summary()
