"""The pressure oracle is worth what it catches: each planted fault spoils memory or a batch, and has to be reported.

Two ways to get moves wrong are not among the faults, since no run gets there: copies from device to device come of forks, which the
scheduler never makes, and no step of it moves blocks both ways.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from paged.attention import StepTokens, run_moves
from paged.block_manager import Moves
from paged.model.runner import runner_for
from paged.testing.pressure import Answers, differences
from paged.testing.pressure_run import PressureRun, run_alone
from paged.testing.shadowed_pool import ShadowedPool

SEEDS = range(10)
Fault = Callable[[PressureRun], None]


@dataclass(frozen=True, repr=False)
class Case:
    """A world in which memory is short, and the answers that would be right."""

    model: Any
    world: Any
    alone: Answers

    def reports(self, fault: Fault | None = None, *, poison: bool = True) -> list[str]:
        """What the oracle says of a run with this fault, shadow and answers. An index out of range, or shapes that do not fit, say
        it, too."""
        try:
            answers = self.answers(fault, poison=poison)
        except (IndexError, ValueError) as error:
            return [f"{type(error).__name__}: {error}"]
        return differences(answers, self.alone) + answers.violations

    def answers(self, fault: Fault | None, *, poison: bool = True) -> Answers:
        """Those of a run with this fault."""
        run = PressureRun(self.model, self.world.conditions, poison=poison)
        if fault is not None:
            fault(run)
        return run.run(self.world.requests, most_steps=1000)


@pytest.fixture(scope="module")
def cases(loaded, draw_world) -> list[Case]:
    """Llama and Gemma 2 in turn, both backends among them."""
    found = []
    for seed in SEEDS:
        model, world = loaded(["llama", "gemma2"][seed % 2]), draw_world(random.Random(seed))
        found.append(Case(model, world, run_alone(model, world.requests, world.conditions.backend)))
    return found


def loses_what_goes_to_the_host(run):
    run.pool.device_to_host = lambda sources, destinations: None


def loses_what_comes_from_the_host(run):
    run.pool.host_to_device = lambda sources, destinations: None


def fetches_the_wrong_host_block(run):
    copy = run.pool.host_to_device
    run.pool.host_to_device = lambda sources, destinations: copy((sources + 1) % run.pool.num_host_blocks, destinations)


def brings_blocks_back_in_the_wrong_order(run):
    copy = run.pool.host_to_device
    run.pool.host_to_device = lambda sources, destinations: copy(sources, destinations.flip(0))


def leaves_the_last_layer_behind(run):
    """A block comes back without what its last layer had."""
    copy = run.pool.host_to_device

    def fetch(sources, destinations):
        kept = [part[destinations].clone() for part in last_layer(run)]
        copy(sources, destinations)
        for part, before in zip(last_layer(run), kept, strict=True):
            part[destinations] = before

    run.pool.host_to_device = fetch


def last_layer(run):
    layer = run.pool.num_layers - 1
    return run.pool.keys(layer), run.pool.values(layer)


def moves_after_the_forward_pass(run):
    def logits(batch):
        found = run.runner.logits(batch)
        run.runner.move(batch)
        return found

    run.logits = logits


def moves_a_step_late(run):
    run.late = Moves()

    def move(batch):
        run_moves(run.pool, run.late)
        run.late = batch.moves

    run.runner.move = move


def alters(run, changes):
    """The forward pass is given a batch of which some arrays are others."""
    logits = run.runner.logits
    run.runner.logits = lambda batch: logits(msgspec.structs.replace(batch, **changes(batch)))


def writes_next_door(run):
    """The last token of each batch goes to its neighbour's slot."""

    def changes(batch):
        slots = batch.slot_mapping.copy()
        slots[-1:] = (slots[-1:] + 1) % run.pool.scratch_slot
        return {"slot_mapping": slots}

    alters(run, changes)


def reads_the_tables_of_the_step_before(run):
    run.stale = np.zeros((0, 0), np.int32)

    def changes(batch):
        tables = np.zeros_like(batch.block_tables)
        rows, columns = run.stale.shape
        tables[:rows, :columns] = run.stale
        run.stale = batch.block_tables.copy()
        return {"block_tables": tables}

    alters(run, changes)


def believes_contexts_shorter(run):
    alters(run, lambda batch: {"seq_lens": np.maximum(batch.seq_lens - 1, batch.num_tokens)})


def believes_contexts_longer(run):
    alters(run, lambda batch: {"seq_lens": batch.seq_lens + 1})


def decodes_one_position_early(run):
    """Words after the first output stand where the word before them stands."""

    def changes(batch):
        is_decode = np.repeat(batch.num_tokens == 1, batch.num_tokens)
        return {"positions": np.maximum(batch.positions - is_decode, 0)}

    alters(run, changes)


def samples_after_the_token_before(run):
    logits = run.runner.forward

    def forward(step, token_ids, is_sampled, lengths):
        return logits(step, token_ids, np.roll(is_sampled, -1), lengths)

    run.runner.forward = forward


def does_not_write_the_last_token_of_a_chunk(run):
    write = run.pool.write_kv

    def write_kv(layer, slots, keys, values):
        last = max(1, len(slots) - 1)
        write(layer, slots[:last], keys[:last], values[:last])

    run.pool.write_kv = write_kv


def cuts_without_telling(run):
    """A sequence that is cut in a tile is said to have all its tokens already."""

    class Untold(StepTokens):
        def part(self, first, stop, num_padded=0):
            begin = int(np.searchsorted(self.query_start_loc, first, "right")) - 1
            end = int(np.searchsorted(self.query_start_loc, stop, "left"))
            return replace(StepTokens.part(self, first, stop, num_padded), seq_lens=self.seq_lens[begin:end])

    forward = run.runner.forward
    run.runner.forward = lambda step, *others: forward(
        Untold(*(getattr(step, field.name) for field in fields(step))), *others
    )


class PadsWithFreed(ShadowedPool):
    """Points padding to a block that whoever is asked says is free."""

    def ask(self, find_free):
        self._find_free = find_free

    @property
    def scratch_slot(self):
        free = self._find_free()
        return int(free[0]) * self.block_size if len(free) else super().scratch_slot


def pads_with_freed_blocks(run):
    """What nobody is to see is read from a block that is free, not from scratch."""
    run.runner.pool.__class__ = PadsWithFreed
    run.runner.pool.ask(lambda: (run.manager.device.states == 0).nonzero()[0])


def frees_a_block_that_is_in_use(run):
    """The last row's first block goes to the first row, which fills it with what it has in its own."""
    tidy = run._poison_free

    def free_early():
        tidy()
        rows = run.manager.rows.live
        blocks = [run.manager.table(int(row))[:1] for row in rows]
        blocks = [int(block[0]) for block in blocks if len(block)]
        if len(set(blocks)) > 1:
            run.pool.device_to_device(torch.tensor(blocks[:1]), torch.tensor(blocks[-1:]))

    run._poison_free = free_early


def forgets_what_is_cached(run):
    """Blocks that nobody holds, but whose content is known, are written over as if they were free."""
    tidy = run._poison_free

    def forget():
        tidy()
        run.pool.poison(torch.from_numpy((run.manager.device.states == 1).nonzero()[0]))

    run._poison_free = forget


def finds_one_block_too_many(run):
    """A prefix hit takes one more block of what is cached than is alike."""
    common = run.manager._memory.index._common
    run.manager._memory.index._common = lambda found, offset, data, block, count: min(
        count, common(found, offset, data, block, count) + 1
    )


def sums_in_whatever_order(run):
    """Packed: every product has the shape that the batch happens to have."""
    run.runner = runner_for(run.runner.model, run.pool, backend=run.runner.backend.name, batch_invariant=False)


FAULTS = [
    loses_what_goes_to_the_host,
    loses_what_comes_from_the_host,
    fetches_the_wrong_host_block,
    brings_blocks_back_in_the_wrong_order,
    leaves_the_last_layer_behind,
    moves_after_the_forward_pass,
    moves_a_step_late,
    writes_next_door,
    reads_the_tables_of_the_step_before,
    believes_contexts_shorter,
    believes_contexts_longer,
    decodes_one_position_early,
    samples_after_the_token_before,
    does_not_write_the_last_token_of_a_chunk,
    cuts_without_telling,
    pads_with_freed_blocks,
    frees_a_block_that_is_in_use,
    forgets_what_is_cached,
    finds_one_block_too_many,
    sums_in_whatever_order,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported(fault, cases):
    assert any(case.reports(fault) for case in cases)


def test_without_a_fault_nothing_is_reported(cases):
    assert [case.reports() for case in cases] == [[]] * len(cases)


def test_poison_is_what_shows_a_read_of_freed_memory(cases):
    case = cases[0]
    assert case.reports(pads_with_freed_blocks) and not case.reports(pads_with_freed_blocks, poison=False)


@pytest.mark.parametrize(
    "fault",
    [
        loses_what_goes_to_the_host,
        loses_what_comes_from_the_host,
        fetches_the_wrong_host_block,
        brings_blocks_back_in_the_wrong_order,
        moves_after_the_forward_pass,
        moves_a_step_late,
        writes_next_door,
        does_not_write_the_last_token_of_a_chunk,
        finds_one_block_too_many,
    ],
)
def test_the_shadow_says_which_slot_it_was(fault, cases):
    said = [violation for case in cases for violation in case.answers(fault).violations]
    assert any("should hold position" in violation for violation in said)
