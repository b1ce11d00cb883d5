"""Requests on our scheduler and worker, several batches out on a slow device, with drafts, aborts and failed steps.

The caller's chance decides when a batch is scheduled, ended or cancelled, and what is guessed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from paged.engine.step_inputs import StepInputs
from paged.model.capacity import pool_for
from paged.model.loading import LoadedModel
from paged.model.runner import runner_for
from paged.scheduler import Batch, Request
from paged.testing.engine_world import EngineWorld, scheduler_in
from paged.testing.late_steps import LateWorker
from paged.testing.pressure import Answers

MOST_DRAFTS = 4


class LateRun:
    """One run, greedy, with up to `depth` batches out. `events` counts what happened."""

    def __init__(
        self, model: LoadedModel, world: EngineWorld, guesses: Answers, chance: random.Random, depth: int
    ) -> None:
        """`guesses`: what drafts are made of; `chance` makes some of them wrong."""
        longest = model.max_length if world.max_model_len is None else world.max_model_len
        self.scheduler = scheduler_in(world, max_model_len=longest, vocabulary=model.vocabulary_size)
        pool = pool_for(
            model, num_blocks=world.num_blocks, block_size=world.block_size, num_host_blocks=world.host_blocks
        )
        self.late = LateWorker(runner_for(model, pool, backend=world.backend, batch_invariant=True))
        self._inputs = StepInputs(world.block_size)
        self.answers = Answers()
        self.events: Counter[str] = Counter()
        self._guesses = guesses
        self._chance = chance
        self._depth = depth
        self._vocabulary = model.vocabulary_size
        self._requests: dict[str, Request] = {}
        self._out: list[Batch] = []

    def run(self, requests: Sequence[Request]) -> Answers:
        """Serve all to their ends, or as far as 10,000 calls lead."""
        chance, arriving = self._chance, list(requests)
        for _ in range(10_000):
            if not (arriving or self._out or self.scheduler.has_unfinished):
                break
            if arriving and chance.random() < 0.4:
                self._add(arriving.pop(0))
            if chance.random() < 0.01:
                self._abort()
            if self._out and chance.random() < 0.04:
                self._cancel(chance.randint(1, len(self._out)))
            if self._out and (len(self._out) == self._depth or chance.random() < 0.3):
                self._end_oldest()
            else:
                self._schedule()
        stats = self.scheduler.stats()
        self.events["recomputed"] += stats.preemptions_recompute
        self.events["swapped"] += stats.preemptions_swap
        self.events["hit"] += stats.hit_tokens
        self.events["void"] += stats.voided_tokens
        self.answers.violations += self.late.violations + self.scheduler.check()
        num_used = self.scheduler.manager.device.num_used
        if num_used and not self.scheduler.has_unfinished:
            self.answers.violations.append(f"{num_used} blocks are held when all have ended.")
        return self.answers

    def _add(self, request: Request) -> None:
        self._requests[request.id] = request
        for sequence in range(request.num_sequences):
            self.answers.expect((request.id, sequence))
        self.scheduler.add(request)

    def _schedule(self) -> None:
        free = (self.scheduler.manager.device.states == 0).nonzero()[0]
        batch = self.scheduler.schedule(drafts=self._drafts())
        if batch.is_empty:
            return
        self.events["unknown"] += int((batch.source_batches >= 0).sum())
        self.events["preempted in flight"] += any(
            id in out.ids.tolist() for id, _ in batch.preempted for out in self._out
        )
        self._out.append(batch)
        self.late.put(batch, self._inputs.of(batch, self._out[0].number), free)

    def _end_oldest(self) -> None:
        """Run the oldest batch and hand its tokens back: of drafts those that are the model's own words, or fewer."""
        batch = self._out.pop(0)
        self.events["late"] += len(self._out) > 0
        step = self.late.take()
        logits = self.late.logits(step)
        words = logits.nan_to_num(nan=torch.inf).argmax(-1).tolist()
        tokens: list[int] = []
        counts, first = np.zeros(len(batch.rows), np.int64), np.zeros(len(batch.rows), np.int32)
        at = 0
        for place in batch.samples.nonzero()[0].tolist():
            num_drafts, last = int(batch.num_drafts[place]), int(batch.query_start_loc[place + 1])
            drafts = batch.token_ids[last - num_drafts : last].tolist()
            num_right = 0
            while num_right < num_drafts and drafts[num_right] == words[at + num_right]:
                num_right += 1
            if num_right and self._chance.random() < 0.2:
                # An engine may accept fewer than were right.
                num_right = self._chance.randrange(num_right)
            self.events["drafts accepted"] += num_right
            self.events["drafts rejected"] += num_drafts - num_right
            counts[place], first[place] = num_right + 1, words[at]
            tokens += words[at : at + num_right + 1]
            who = batch.ids[place], int(batch.sequences[place])
            first_place = int(batch.seq_lens[place]) - num_drafts - len(self._requests[who[0]].prompt)
            for behind, row in enumerate(logits[at : at + num_right + 1]):
                self.answers.see(who, first_place + behind, row)
            at += num_drafts + 1
        self.late.keep(step.input, first)
        for output in self.scheduler.update(batch, tokens, counts):
            self.answers.take(output)

    def _cancel(self, count: int) -> None:
        """The latest batches fail; the oldest of them may have made its copies, or stop within its forward pass."""
        if count == len(self._out):
            how = self._chance.choice(["before", "behind", "within"])
            if how == "behind":
                self.late.begin_oldest()
            if how == "within":
                self.late.spoil()
            self.events[f"cancelled {how}"] += 1
        for _ in range(count):
            batch = self._out.pop()
            self.events["cancelled with copies"] += len(batch.moves) > 0
            self.scheduler.cancel(batch, moved=self.late.drop(batch, self._inputs))
            self.events["cancelled"] += 1

    def _abort(self) -> None:
        live = [id for id in self._requests if (id, 0) not in self.answers.reasons]
        if not live:
            return
        id = self._chance.choice(live)
        in_flight = any(id in batch.ids.tolist() for batch in self._out)
        output = self.scheduler.abort(id)
        if output is not None:
            self.answers.take(output)
            self.events["aborted"] += 1
            self.events["aborted in flight"] += in_flight

    def _drafts(self) -> dict[str, list[int]]:
        """Guesses, mostly right ones, of what follows the tokens that are known or being sampled."""
        guessed = {}
        for id in self._requests:
            if (id, 0) in self.answers.reasons or self.scheduler.status(id) != "running" or self._chance.random() < 0.3:
                continue
            awaited = sum(id in batch.ids[batch.samples].tolist() for batch in self._out)
            known = len(self.answers.tokens[id, 0]) + awaited
            guess = self._guesses.tokens[id, 0][known:][: self._chance.randint(0, MOST_DRAFTS)]
            if guess and self._chance.random() < 0.4:
                wrong = self._chance.randrange(len(guess))
                guess[wrong] = (guess[wrong] + 1) % self._vocabulary
            guessed[id] = guess
        return guessed
