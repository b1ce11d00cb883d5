"""A manager of layers of several kinds beside a naive one, through every call that changes a row: the same pages are free, the same columns
are there, and what is refused is refused by both, with the same number of pages."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from paged import BlockManager
from paged.errors import InvalidConfig, OutOfBlocks
from paged.testing.invariants import memory_violations
from paged.testing.machines import settings_for
from paged.testing.naive_layers import NaiveLayers, NaiveRow, pages_for
from paged.testing.strategies import layer_groups, picks

LONGEST = 12


def with_rows(machine):
    return any(not state.is_swapped for state in machine.naive.rows.values())


class ManagerOfLayers(RuleBasedStateMachine):
    @initialize(
        groups=layer_groups(), size=st.integers(1, 3), share=st.sampled_from([2, 4, 6, 8]), host=st.integers(0, 2)
    )
    def begin(self, groups, size, share, host):
        self.groups = groups
        num_pages = max(1, pages_for(groups, LONGEST, size) * share // 4)
        host_pages = num_pages * host // 2
        self.manager = BlockManager(num_pages, size, groups=groups, prefix_caching=False, host_blocks=host_pages)
        self.naive = NaiveLayers(groups, num_pages, size, host_pages)

    def row(self, pick, *, on_host=False):
        rows = sorted(row for row, state in self.naive.rows.items() if not state.is_swapped or on_host)
        return rows[pick % len(rows)]

    @rule(length=st.integers(1, LONGEST))
    def add(self, length):
        self.naive.rows[self.manager.add(range(length))] = NaiveRow(length)

    @precondition(lambda self: self.naive.rows)
    @rule(pick=picks, length=st.integers(1, 4))
    def append(self, pick, length):
        row = self.row(pick, on_host=True)
        self.manager.append(row, [0] * length)
        self.naive.rows[row].num_known += length

    @precondition(with_rows)
    @rule(wishes=st.lists(st.tuples(picks, st.integers(1, 6)), min_size=1, max_size=3))
    def allocate(self, wishes):
        counts = {}
        for pick, count in wishes:
            row = self.row(pick)
            left = self.naive.rows[row].num_known - self.naive.rows[row].launched
            if left:
                counts[row] = min(count, left)
        if counts and len(self.naive.batches) < 3:
            self.manager.next_batch()
            self.both(self.naive.allocate(counts), self.manager.allocate, list(counts), list(counts.values()))

    @precondition(with_rows)
    @rule(pick=picks, blocks=st.integers(0, 8))
    def reserve(self, pick, blocks):
        row = self.row(pick)
        blocks = min(blocks, self.manager.num_blocks)
        self.both(self.naive.reserve(row, blocks), self.manager.reserve, row, blocks)

    @precondition(lambda self: self.naive.rows)
    @rule(pick=picks, keep=st.sampled_from([0, 0, 1, 2, 3]))
    def swap_out(self, pick, keep):
        row = self.row(pick, on_host=True)
        keep = min(keep, self.naive.rows[row].blocks)
        self.both(self.naive.swap_out(row, keep), self.manager.swap_out, row, keep, tier="host")

    @precondition(lambda self: any(state.is_swapped for state in self.naive.rows.values()))
    @rule(pick=picks)
    def swap_in(self, pick):
        rows = sorted(row for row, state in self.naive.rows.items() if state.is_swapped)
        row = rows[pick % len(rows)]
        self.both(self.naive.swap_in(row), self.manager.swap_in, row)

    def both(self, short, call, *arguments, tier="device"):
        """`short`: pages that the naive one wanted and did not find, 0 if it did."""
        if not short:
            call(*arguments)
            return
        with pytest.raises(OutOfBlocks) as refused:
            call(*arguments)
        free = self.naive.num_free if tier == "device" else self.naive.num_free_on_host
        assert (refused.value.wanted, refused.value.free, refused.value.tier) == (short, free, tier)

    @precondition(lambda self: self.naive.batches)
    @rule()
    def confirm(self):
        self.manager.confirm()
        self.naive.confirm()

    @precondition(lambda self: self.naive.batches)
    @rule()
    def cancel(self):
        self.manager.cancel()
        self.naive.cancel()

    @precondition(lambda self: self.naive.rows)
    @rule(pick=picks, blocks=st.integers(0, 6))
    def truncate(self, pick, blocks):
        row = self.row(pick, on_host=True)
        blocks = min(blocks, self.naive.rows[row].blocks)
        if self.naive.truncate(row, blocks):
            self.manager.truncate(row, blocks)
        else:
            with pytest.raises(InvalidConfig, match=f"row {row} cannot stand at"):
                self.manager.truncate(row, blocks)

    @precondition(lambda self: self.naive.rows)
    @rule(pick=picks)
    def free(self, pick):
        row = self.row(pick, on_host=True)
        self.manager.free(row)
        self.naive.free(row)

    def check_invariants(self, *args, **kwargs):
        super().check_invariants(*args, **kwargs)
        if not hasattr(self, "naive"):
            return
        manager, naive = self.manager, self.naive
        assert manager.check() == []
        assert memory_violations(manager, groups=self.groups) == []
        assert manager.device.num_free == naive.num_free
        assert manager.host.num_free == naive.num_free_on_host
        for row in naive.rows:
            for number in range(len(self.groups)):
                there = (manager.group_pages(number, row) >= 0).all(axis=1).tolist()
                assert there == naive.there(row, number), (row, self.groups[number])


def test_the_manager_holds_what_the_naive_one_holds():
    run_state_machine_as_test(ManagerOfLayers, settings=settings_for(60, steps=30))
