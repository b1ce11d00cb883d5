"""The pressure oracle: an answer under memory pressure has to be the answer without it, tokens and logits, to the last bit.

`PressureRun` runs requests through our scheduler and a model runner under given conditions and keeps every logit row that was sampled
from; `differences` compares two such runs. Blocks are filled with NaN when they become free, so that a read of somebody else's
memory shows, and a shadow keeps who wrote which slot. Knows public calls of scheduler, pool and runner. Does not know why two runs differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from block_manager import BlockManager
from paged.model.capacity import pool_for
from paged.model.loading import LoadedModel
from paged.model.runner import runner_for
from paged.testing.shadowed_pool import ShadowedPool
from scheduler import Batch, Request, Scheduler

# A request's id and the number of one of its sequences.
Who = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a run has to live with: the pool, the policy, the budget, and how attention is computed."""

    num_blocks: int
    block_size: int = 16
    host_blocks: int = 0
    policy: str = "paged"
    max_tokens_per_step: int = 4096
    max_sequences: int = 64
    max_chunk: int | None = None
    prefix_caching: bool = True
    backend: str = "torch_gather"


@dataclass(slots=True)
class Answers:
    """By request and sequence: its tokens, and for each the logits that it was taken from, float32 [vocabulary]. What pressure did,
    and what the shadow found in a slot that should have held something else."""

    tokens: dict[Who, list[int]] = field(default_factory=dict)
    logits: dict[Who, list[Tensor]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    recomputed: int = 0
    swapped: int = 0
    hit_tokens: int = 0
    steps: int = 0


class PressureRun:
    """One run. Its methods are what a planted fault replaces."""

    def __init__(self, model: LoadedModel, conditions: Conditions, *, poison: bool = True) -> None:
        self.poison = poison
        self.manager = BlockManager(
            conditions.num_blocks,
            conditions.block_size,
            host_blocks=conditions.host_blocks,
            prefix_caching=conditions.prefix_caching,
        )
        self.scheduler = Scheduler(
            self.manager,
            policy=conditions.policy,
            max_tokens_per_step=conditions.max_tokens_per_step,
            max_sequences=conditions.max_sequences,
            max_chunk=conditions.max_chunk,
            max_model_len=model.max_length,
            vocabulary_size=model.vocabulary_size,
        )
        pool = pool_for(
            model,
            num_blocks=conditions.num_blocks,
            block_size=conditions.block_size,
            num_host_blocks=conditions.host_blocks,
            kind=ShadowedPool,
        )
        assert isinstance(pool, ShadowedPool), "that kind was asked for"
        self.pool = pool
        self._contents: dict[Who, list[int]] = {}
        self.runner = runner_for(model, self.pool, backend=conditions.backend, batch_invariant=True)

    def logits(self, batch: Batch) -> Tensor:
        """Moves, then the forward pass."""
        self.runner.move(batch)
        return self.runner.logits(batch)

    def run(self, requests: Sequence[Request], most_steps: int = 10_000) -> Answers:
        """Run all to the end, greedily. Raises RuntimeError when that takes more than `most_steps` steps."""
        answers, scheduler = Answers(violations=self.pool.violations), self.scheduler
        self._poison_free()
        for request in requests:
            scheduler.add(request)
            for sequence in range(request.num_sequences):
                each = (request.id, sequence)
                answers.tokens[each], answers.logits[each] = [], []
                namespace = (request.salt, request.adapter, request.extra_key)
                self._contents[each] = self.pool.shadow.contents.path(namespace, request.prompt).tolist()
        while scheduler.has_unfinished:
            answers.steps += 1
            if answers.steps > most_steps:
                raise RuntimeError(f"{most_steps} steps, and not done: {scheduler.counts()}.")
            batch = scheduler.schedule()
            expected = self._expected(batch)
            new = [
                contents[start:] for contents, start in zip(expected, batch.positions[batch.starts[:-1]], strict=True)
            ]
            self.pool.plan(batch.slot_mapping, np.concatenate([np.empty(0, np.int64), *new]))
            logits = self.logits(batch)
            for i, contents in enumerate(expected):
                who = _name((batch.ids[i], int(batch.sequences[i])))
                self.pool.check_row(batch.block_tables[batch.rows[i]], contents, who)
            tokens = logits.nan_to_num(nan=torch.inf).argmax(-1).to(torch.int32).numpy()
            sampled = (batch.ids[batch.samples].tolist(), batch.sequences[batch.samples].tolist())
            for request_id, sequence, row in zip(*sampled, logits, strict=True):
                answers.logits[request_id, sequence].append(row.clone())
            for output in scheduler.update(batch, tokens):
                self._add((output.id, output.sequence), output.token_ids)
                answers.tokens[output.id, output.sequence] += output.token_ids
            self._poison_free()
        stats = scheduler.stats()
        answers.recomputed, answers.swapped = stats.preemptions_recompute, stats.preemptions_swap
        answers.hit_tokens = stats.hit_tokens
        return answers

    def _add(self, who: Who, token_ids: list[int]) -> None:
        contents = self._contents[who]
        for token in token_ids:
            contents.append(self.pool.shadow.contents.extend(contents[-1], token))

    def _expected(self, batch: Batch) -> list[NDArray[np.int64]]:
        """For each row, what the slots of its context hold after this step."""
        whose = zip(batch.ids.tolist(), batch.sequences.tolist(), batch.context_lens.tolist(), strict=True)
        return [np.array(self._contents[request_id, sequence][:length]) for request_id, sequence, length in whose]

    def _poison_free(self) -> None:
        if self.poison:
            self.pool.poison(torch.from_numpy((self.manager.block_states() == 0).nonzero()[0].astype(np.int64)))


def run_alone(model: LoadedModel, requests: Sequence[Request], backend: str) -> Answers:
    """Each request by itself, its prompt in one step, in memory that it cannot fill."""
    together = Answers()
    for request in requests:
        longest = len(request.prompt) + request.max_tokens
        conditions = Conditions(
            num_blocks=request.num_sequences * -(-longest // 16) + 1,
            max_tokens_per_step=request.num_sequences * longest,
            prefix_caching=False,
            backend=backend,
        )
        answers = PressureRun(model, conditions).run([request])
        together.tokens |= answers.tokens
        together.logits |= answers.logits
        together.violations += answers.violations
    return together


def differences(ours: Answers, theirs: Answers) -> list[str]:
    """Every request whose tokens or logits are not the same bits in both, in a sentence; empty when there is none."""
    found = []
    for who, tokens in theirs.tokens.items():
        if ours.tokens[who] != tokens:
            found.append(f"request {_name(who)}: tokens {ours.tokens[who]} instead of {tokens}.")
            continue
        for place, (a, b) in enumerate(zip(ours.logits[who], theirs.logits[who], strict=True)):
            if not torch.equal(a, b):
                off = float((a - b).abs().max())
                found.append(f"request {_name(who)}: the logits of its output {place} differ by up to {off:.3g}.")
                break
    return found


def _name(who: Who) -> str:
    request_id, sequence = who
    return f"{request_id}, sequence {sequence}" if sequence else request_id
