"""Random schedulers, driven by random engines and clients: what each step decided, as plain data.

    for step in decisions(17, "paged"): ...      the same lists at every call, in any process

A world draws from its own `random.Random`, so nothing but decisions can change what comes next. It uses drafts, several outstanding
batches, forks, groups, retention, the host tier, tokens from elsewhere, aborts, cancels, tenants and wrong calls.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from paged import POLICIES, BlockManager, Costs, PagedError, Request, Retention, Scheduler
from paged.scheduler import Batch, Output, Outputs

with suppress(ImportError):
    # Older commits have all policies in the scheduler.
    import paged.study  # noqa: F401


ALIVE = ("waiting", "loading", "running", "paused", "swapped")
MOST_ALIVE = 10
DRAIN_STEPS = 40
Record = list[Any]


def decisions(number: int, policy: str) -> Iterator[list[Record]]:
    """What each step of a world did: a list of its calls, each a list of the call's name and what came of it."""
    return _World(number, policy).steps()


def batch_record(batch: Batch) -> Record:
    """All that a batch says, but for what follows from the rest."""
    arrays = (
        *(batch.rows, batch.num_tokens, batch.token_ids, batch.source_batches, batch.source_places, batch.slot_mapping),
        *(batch.seq_lens, batch.samples, batch.num_drafts, batch.ids, batch.sequences),
        *(batch.table_rows, batch.table_columns, batch.table_blocks, batch.loads),
        *(batch.moves.device_to_host, batch.moves.host_to_device, batch.moves.device_to_device),
    )
    said = [batch.number, batch.is_empty, batch.has_outputs, batch.preempted, batch.admitted]
    return [*said, *(array.tolist() for array in arrays)]


def _output_record(output: Output) -> Record:
    usage = None if output.usage is None else msgspec.structs.astuple(output.usage)
    return [output.id, output.sequence, output.token_ids, output.finish_reason, usage]


class _World:
    def __init__(self, number: int, policy: str) -> None:
        self.draw = draw = random.Random(f"{number} {policy}")
        size, blocks = draw.choice([1, 2, 4, 16]), draw.randint(6, 28)
        host = draw.choice([0, 6, 16])
        caches = draw.random() < 0.85
        self.manager = BlockManager(
            blocks,
            size,
            host_blocks=host,
            prefix_caching=caches,
            host_caching=host > 0 and caches and draw.random() < 0.6,
        )
        self.longest = blocks * size if draw.random() < 0.7 else max(4, blocks * size // 2)
        self.vocabulary = draw.choice([2, 3, 50])
        self.max_outstanding = draw.choice([1, 2, 2, 3])
        self.reads_events = draw.random() < 0.3
        max_sequences = draw.choice([3, 4, 8])
        self.scheduler = Scheduler(
            self.manager,
            policy=self._policy(policy),
            max_tokens_per_step=max(max_sequences, draw.choice([4, 8, 16, 64])),
            max_sequences=max_sequences,
            max_model_len=self.longest,
            max_waiting=draw.choice([None, None, None, 6]),
            max_chunk=draw.choice([None, None, 3, 8]),
            vocabulary_size=self.vocabulary,
            costs=Costs(seconds_per_swapped_block=draw.choice([84e-6, 1e-6])),
            tenant_weights={"a": 2.0, "b": 0.5} if POLICIES[policy].order == "fair" else None,
            max_outstanding=self.max_outstanding,
            resumes_known=draw.random() < 0.2,
        )
        self.now, self.num_added = 0.0, 0
        self.out: list[Batch] = []
        self.alive: list[str] = []
        self.quiet: list[tuple[str, int]] = []
        self.done: list[Record] = []

    def _policy(self, name: str) -> Any:
        draw, policy = self.draw, POLICIES[name]
        changes: dict[str, Any] = {}
        if policy.foresight != "none":
            changes["known_outputs"] = draw.choice([0, 2, 64])
        if policy.reservation == "prompt" and policy.layout == "blocks":
            changes["preemption"] = draw.choice([policy.preemption, "recompute", "swap", "cheapest"])
            changes["max_preemptions"] = draw.choice([policy.max_preemptions, None, 1])
            changes["watermark"] = draw.choice([policy.watermark, 0.1])
        return msgspec.structs.replace(policy, **changes)

    def steps(self) -> Iterator[list[Record]]:
        num_steps = self.draw.randint(40, 140)
        for step in range(num_steps + DRAIN_STEPS):
            self.done = []
            self.now += self.draw.choice([0.0, 0.01, 0.01, 1.0])
            if step < num_steps:
                while len(self.alive) < MOST_ALIVE and self.draw.random() < 0.4:
                    self._add()
            self._meddle()
            self._go_on()
            yield self._ended()
        self.done = []
        for id in list(self.alive):
            self._call("abort", id)
        while self.out:
            self._end_oldest()
        violations = self.scheduler.check()
        assert not violations, violations
        yield self._ended()

    def _ended(self) -> list[Record]:
        memory = self.manager
        self.alive = [id for id in self.alive if self.scheduler.status(id) in ALIVE]
        self.quiet = [each for each in self.quiet if each[0] in self.alive]
        counts = list(self.scheduler.counts().values())
        self.done.append(["counts", memory.device.num_free, memory.host.num_used, self.scheduler.num_reserved, counts])
        return self.done

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call the scheduler; an error is a decision, too: its type."""
        try:
            found = getattr(self.scheduler, name)(*arguments, **named)
        except PagedError as error:
            self.done.append([name, type(error).__name__])
            return error
        if isinstance(found, Batch):
            self.done.append([name, batch_record(found)])
        elif isinstance(found, Outputs):
            self.done.append([name, [_output_record(each) for each in found]])
        else:
            self.done.append([name, _output_record(found) if isinstance(found, Output) else found])
        return found

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(self.vocabulary) for _ in range(count)]

    def _add(self) -> None:
        draw = self.draw
        trunk = random.Random(draw.randrange(3))
        beginning = [trunk.randrange(self.vocabulary) for _ in range(draw.randint(0, self.longest // 2))]
        prompt = (beginning + self._tokens(draw.randint(1, 6)))[
            : draw.choice([self.longest // 5 + 1, self.longest // 3 + 1, self.longest])
        ]
        max_tokens = draw.randint(1, max(2, self.longest // 2))
        is_group = draw.random() < 0.12
        is_private = not is_group and draw.random() < 0.1
        request = Request(
            id=f"r{self.num_added}",
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=draw.choice([0, 0, 1]),
            eos_token_id=draw.choice([None, None, None, 0]),
            stop_token_ids=draw.choice([(), (), (), (1,)]),
            priority=draw.choice([0, 0, 0, 1, -1]),
            num_sequences=draw.choice([2, 3]) if is_group else 1,
            num_computed=draw.choice([3, 9, 20]) if not is_group and draw.random() < 0.1 else 0,
            expected_tokens=draw.choice([None, 1, max_tokens // 2 + 1, max_tokens]),
            salt=draw.choice([None, None, None, None, "a"]),
            adapter=draw.choice([None, None, None, None, None, "a"]),
            reads_cache=not is_private or draw.random() < 0.5,
            writes_cache=not is_private,
            retention=draw.choice([None, None, None, Retention(priority=1), Retention(priority=3, lasts=9.0)]),
            tenant=draw.choice([None, "a", "a", "b"]),
        )
        self.num_added += 1
        if not isinstance(self._call("add", request, self.now), PagedError):
            self.alive.append(request.id)

    def _meddle(self) -> None:
        """What clients and loaders do between two steps."""
        draw, scheduler = self.draw, self.scheduler
        for id in [id for id in self.alive if scheduler.status(id) == "loading"]:
            if draw.random() < 0.5:
                arrived = draw.choice([0, 1, self.manager.block_size, 2 * self.manager.block_size])
                if isinstance(self._call("loaded", id, arrived), PagedError):
                    self._call("loaded", id, 0)
        for id, sequence in self.quiet:
            if draw.random() < 0.4:
                self._call("append", id, self._tokens(draw.randint(1, 3)), sequence)
                self.quiet = [each for each in self.quiet if each != (id, sequence)]
        if not self.alive:
            return
        id, chance = draw.choice(self.alive), draw.random()
        if chance < 0.03:
            self._call("abort", id)
        elif chance < 0.05:
            self._call("finish", id, draw.choice([0, 0, 1]), draw.choice(["stop", "length"]))
        elif chance < 0.15:
            self._call("fork", draw.choice(scheduler.running_ids() or [id]), draw.choice([0, 0, 0, 1]))
        elif chance < 0.2:
            self._call("append", id, self._tokens(draw.randint(0, 4)))
        elif chance < 0.205:
            self.done.append(["reset_cache", self.manager.reset_cache()])
        elif chance < 0.27 and self.reads_events:
            self.done.append(["events", [_event_record(event) for event in self.manager.take_events()]])

    def _go_on(self) -> None:
        """Schedule, or end the oldest batch, or cancel the newest."""
        draw = self.draw
        if self.out and (len(self.out) == self.max_outstanding or draw.random() < 0.5):
            if draw.random() < 0.06:
                newest = self.out.pop()
                if isinstance(self._call("cancel", newest, moved=draw.random() < 0.5), PagedError):
                    self._call("cancel", newest, moved=True)
            else:
                self._end_oldest()
            return
        batch = self._call("schedule", self.now, self._drafts())
        assert isinstance(batch, Batch), batch
        if not batch.is_empty:
            self.out.append(batch)

    def _drafts(self) -> dict[str, list[int]] | None:
        draw = self.draw
        if draw.random() < 0.6:
            return None
        running = [id for id in self.scheduler.running_ids() if draw.random() < 0.7 and self.scheduler.row_of(id) >= 0]
        return {id: [-1] * 2 if draw.random() < 0.2 else self._tokens(draw.randint(1, 5)) for id in running}

    def _end_oldest(self) -> None:
        batch = self.out.pop(0)
        counts, tokens = self._sampled(batch)
        found = self._call("update", batch, tokens, counts, self.now)
        if isinstance(found, PagedError):
            counts = batch.samples.astype(np.int64)
            found = self._call("update", batch, self._tokens(int(counts.sum())), None, self.now)
        assert isinstance(found, Outputs), found
        starved = (batch.samples & (counts == 0)).nonzero()[0].tolist()
        self.quiet += [(batch.ids[place], int(batch.sequences[place])) for place in starved]

    def _sampled(self, batch: Batch) -> tuple[np.ndarray, list[int]]:
        """How many tokens each row got, and which: drafts that were right, and one; now and then none, or two."""
        draw, counts, tokens = self.draw, np.zeros(len(batch.rows), np.int64), []
        is_odd = draw.random() < 0.12
        for place in batch.samples.nonzero()[0].tolist():
            num_drafts, stop = int(batch.num_drafts[place]), int(batch.query_start_loc[place + 1])
            right = draw.randint(0, num_drafts)
            drafts = batch.token_ids[stop - num_drafts : stop - num_drafts + right].tolist()
            got = [token if token >= 0 else draw.randrange(self.vocabulary) for token in drafts] + self._tokens(1)
            if is_odd and not num_drafts:
                got = self._tokens(draw.choice([0, 1, 2]))
            counts[place] = len(got)
            tokens += got
        return counts, tokens


def _event_record(event: Any) -> Record:
    hashes = [each.hex() for each in getattr(event, "hashes", ())]
    return [type(event).__name__, getattr(event, "tier", None), hashes]
