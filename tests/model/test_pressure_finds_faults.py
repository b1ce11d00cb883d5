"""The pressure oracle is worth what it catches: each planted fault spoils memory or a batch, and has to be reported.

Two ways to get moves wrong are not among the faults, since no run gets there: copies from device to device come of forks, which the
scheduler never makes, and no step of it moves blocks both ways.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from paged.attention import StepTokens
from paged.block_manager import Moves
from paged.model.runner import runner_for
from paged.testing.pressure import Answers, differences
from paged.testing.pressure_run import PressureRun, ShadowedPool, run_alone

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
        run = PressureRun(self.model, self.world.conditions, poison=poison)
        if fault is not None:
            fault(run)
        try:
            answers = run.run(self.world.requests, most_steps=1000)
        except (IndexError, ValueError) as error:
            return [f"{type(error).__name__}: {error}"]
        return differences(answers, self.alone) + answers.violations


@pytest.fixture(scope="module")
def cases(loaded, draw_world) -> list[Case]:
    """Llama and Gemma 2 in turn, in worlds where requests are computed again, swapped, find what others left, and are cut in tiles."""
    found = []
    for number, seed in enumerate((0, 31, 16, 39, 2, 1)):
        model, world = loaded(["llama", "gemma2"][number % 2]), draw_world(random.Random(seed))
        found.append(Case(model, world, run_alone(model, world.requests, world.conditions.backend)))
    return found


def instead(part: str, name: str, call: Callable[..., Any]) -> Fault:
    """A method of a part of the run is replaced by call(run, the method, *its arguments)."""

    def replace_it(run: PressureRun) -> None:
        owner = attrgetter(part)(run)
        setattr(owner, name, partial(call, run, getattr(owner, name)))

    return replace_it


def altered(changes: Callable[[Any], dict[str, Any]]) -> Fault:
    """The forward pass is given a step of which some arrays are others."""
    return instead(
        "worker",
        "logits",
        lambda run, logits, step: logits(step._replace(tokens=replace(step.tokens, **changes(step)))),
    )


def last_layer_left_behind(run, copy, sources, destinations):
    """A block comes back without what its last layer had."""
    last = (run.pool.keys(run.pool.num_layers - 1), run.pool.values(run.pool.num_layers - 1))
    before = [part.clone() for part in last]
    copy(sources, destinations)
    for part, kept in zip(last, before, strict=True):
        part.copy_(kept)


def moves_after_the_forward_pass(run):
    def logits(batch):
        step = run.inputs.of(batch)
        run.worker.begin(msgspec.structs.replace(step, moves=Moves()))
        found = run.worker.logits(run.worker.ready(step))
        run.worker.runner.copy(step.moves)
        return found

    run.logits = logits


def next_door(step):
    """The last token of each step goes to its neighbour's slot."""
    slots = step.tokens.slot_mapping.copy()
    slots[-1:] = np.abs(slots[-1:] - 1)
    return {"slot_mapping": slots}


def reads_the_tables_of_the_step_before(run):
    run.stale = np.zeros((0, 0), np.int32)

    def changes(step):
        kept = run.worker._tables[0]
        tables = np.zeros_like(kept)
        rows, columns = run.stale.shape
        tables[:rows, :columns] = run.stale
        run.stale = kept.copy()
        return {"block_tables": tables[step.input.rows, : step.tokens.block_tables.shape[1]]}

    altered(changes)(run)


def one_position_early(step):
    """Words after the first output stand where the word before them stands."""
    counts = step.input.num_tokens
    return {"positions": np.maximum(step.tokens.positions - np.repeat(counts == 1, counts), 0)}


def last_token_of_a_chunk_not_written(run, write, layer, slots, keys, values, **options):
    last = max(1, len(slots) - 1)
    write(layer, slots[:last], keys[:last], values[:last], **options)


class Untold(StepTokens):
    """A sequence that is cut in a tile is said to have all its tokens already."""

    def part(self, first, stop, num_padded=0):
        begin = int(np.searchsorted(self.query_start_loc, first, "right")) - 1
        end = int(np.searchsorted(self.query_start_loc, stop, "left"))
        return replace(StepTokens.part(self, first, stop, num_padded), seq_lens=self.seq_lens[begin:end])


def cut_without_telling(run, forward, step, *others):
    return forward(Untold(*(getattr(step, field.name) for field in fields(step))), *others)


def pads_with_freed_blocks(run):
    """What nobody is to see is read from a block that is free, not from scratch."""

    class PadsWithFreed(ShadowedPool):
        @property
        def scratch_block(self):
            free = (run.manager.device.states == 0).nonzero()[0]
            return int(free[0]) if len(free) else super().scratch_block

    run.pool.__class__ = PadsWithFreed


def frees_a_block_that_is_in_use(run):
    """The last row's first block goes to the first row, which fills it with what it has in its own."""
    tidy = run._poison_free

    def free_early():
        tidy()
        tables = [run.manager.table(int(row)) for row in run.manager.rows.live]
        blocks = [int(table[0]) for table in tables if len(table)]
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
    index = run.manager._memory.index
    common = index._common
    index._common = lambda found, offset, data, block, count: min(count, common(found, offset, data, block, count) + 1)


def sums_in_whatever_order(run):
    """Packed: every product has the shape that the batch happens to have."""
    right = run.worker.runner
    run.worker.runner = runner_for(right.model, run.pool, backend=right.backend.name, batch_invariant=False)


# What the shadow says, where it sees the fault: which slot it was.
SLOT = "should hold position"
FROM_HOST = "pool", "host_to_device"
FAULTS = {
    "loses what goes to the host": (instead("pool", "device_to_host", lambda *_: None), SLOT),
    "loses what comes from the host": (instead(*FROM_HOST, lambda *_: None), SLOT),
    "brings blocks back in the wrong order": (
        instead(*FROM_HOST, lambda run, copy, blocks, to: copy(blocks, to.flip(0))),
        SLOT,
    ),
    "leaves the last layer behind": (instead(*FROM_HOST, last_layer_left_behind), ""),
    "moves after the forward pass": (moves_after_the_forward_pass, SLOT),
    "writes next door": (altered(next_door), SLOT),
    "reads the tables of the step before": (reads_the_tables_of_the_step_before, ""),
    "believes contexts shorter": (
        altered(lambda step: {"seq_lens": np.maximum(step.tokens.seq_lens - 1, step.input.num_tokens)}),
        "",
    ),
    "decodes one position early": (altered(one_position_early), ""),
    "samples after the token before": (
        instead(
            "worker.runner",
            "forward",
            lambda run, forward, step, ids, is_sampled, n: forward(step, ids, np.roll(is_sampled, -1), n),
        ),
        "",
    ),
    "does not write the last token of a chunk": (instead("pool", "write_kv", last_token_of_a_chunk_not_written), SLOT),
    "cuts without telling": (instead("worker.runner", "forward", cut_without_telling), ""),
    "pads with freed blocks": (pads_with_freed_blocks, ""),
    "frees a block that is in use": (frees_a_block_that_is_in_use, ""),
    "forgets what is cached": (forgets_what_is_cached, ""),
    "finds one block too many": (finds_one_block_too_many, SLOT),
    "sums in whatever order": (sums_in_whatever_order, ""),
}


@pytest.mark.parametrize(("fault", "said"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_reported(fault, said, cases):
    assert any(said in report for case in cases for report in case.reports(fault))


def test_without_a_fault_nothing_is_reported(cases):
    assert [case.reports() for case in cases] == [[]] * len(cases)


def test_poison_is_what_shows_a_read_of_freed_memory(cases):
    case = cases[0]
    assert case.reports(pads_with_freed_blocks) and not case.reports(pads_with_freed_blocks, poison=False)
