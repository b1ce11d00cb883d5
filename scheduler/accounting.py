"""Totals of every token: computed, shared, wasted, emitted."""

from __future__ import annotations

import msgspec


class SchedulerStats(msgspec.Struct):
    """Totals since the scheduler was made, in tokens unless said otherwise.

    steps                    batches that ran
    computed_tokens          in updated batches, recomputed ones included
    recomputed_tokens        of computed_tokens: computed before, and lost to a preemption
    prompt_tokens            of requests admitted for the first time
    hit_tokens               of prompt_tokens: found in the prefix cache
    host_hit_tokens          of hit_tokens: copied back from the host
    shared_in_flight_tokens  of hit_tokens: another row of the same batch was still computing them
    output_tokens            sampled and delivered
    voided_tokens            of computed_tokens: of sequences that had ended, or got no token in an earlier batch
    drafted_tokens           drafts in updated batches; accepted_tokens of them were right, the others are rejected
    cancelled_tokens         in flight in cancelled batches
    swapped_out_blocks, swapped_in_blocks    blocks, or pages, copied to the host and back
    preemptions_recompute, preemptions_swap  requests that lost blocks for want of memory, by what became of their tail
    max_preemptions          most preemptions of one request
    admitted, finished, rejected, aborted    requests; admitted counts first admissions
    """

    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    shared_in_flight_tokens: int = 0
    output_tokens: int = 0
    voided_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cancelled_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    max_preemptions: int = 0
    admitted: int = 0
    finished: int = 0
    rejected: int = 0
    aborted: int = 0

    def count(self, **more: int) -> None:
        """Add to the totals of these names."""
        for name, number in more.items():
            setattr(self, name, getattr(self, name) + number)

    def count_preemption(self, kind: str, nth: int) -> None:
        """A request was preempted for the `nth` time, by "swap" or "recompute"."""
        self.count(**{f"preemptions_{kind}": 1})
        self.max_preemptions = max(self.max_preemptions, nth)

    @property
    def preemptions(self) -> int:
        return self.preemptions_recompute + self.preemptions_swap

    @property
    def rejected_tokens(self) -> int:
        return self.drafted_tokens - self.accepted_tokens
