"""The copies of a step: all layers go, the three kinds keep their order, and a wrong block stops all of them.

Every block holds one number of its own: 10, 11, ... on the device, 20, 21, ... on the host; slot and layer come behind the point.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from paged import Moves
from paged.attention import KVPool, run_moves
from paged.attention.pages import _kernel

from ..shown import assert_refused, shown_in  # noqa: TID252

NUM_DEVICE, NUM_HOST = 5, 4


def pairs(*found):
    return np.array(found, np.int32).reshape(-1, 2)


def moves(to_host=(), to_device=(), on_device=()):
    return Moves(pairs(*to_host), pairs(*to_device), pairs(*on_device))


def parts_of(tier):
    """What tells the parts of a block from one another, all less than 1 and exact."""
    shape = tier.shape[1:]
    return torch.arange(shape.numel(), dtype=tier.dtype).view(shape) / 256


def fill(tier, first):
    """Give the blocks of a tier, [blocks, ...], numbers from `first` on."""
    for block in range(len(tier)):
        tier[block] = first + block + parts_of(tier)


def device(pool):
    """The device's blocks: [blocks, numbers of a block]."""
    return pool.pages.on_device.view(torch.float64)


def host(pool):
    """The host's blocks: [blocks, numbers of a block]."""
    return pool.pages.on_host.view(torch.float64)


def numbers(tier):
    """Each block's number; -1 if some part of it is another block's, or at another place."""
    whole = tier.flatten(1)[:, 0]
    is_one = (tier - parts_of(tier)).flatten(1) == whole[:, None]
    return torch.where(is_one.all(1), whole, -1).tolist()


def make_pool():
    """Five device and four host blocks of two tokens, three layers."""
    sizes = {"num_layers": 3, "block_size": 2, "num_kv_heads": 2, "head_dim": 3, "dtype": torch.float64}
    pool = KVPool(num_blocks=NUM_DEVICE, num_host_blocks=NUM_HOST, **sizes)
    fill(device(pool)[:NUM_DEVICE], 10)
    fill(host(pool), 20)
    return pool


def state(pool):
    return numbers(device(pool)[:NUM_DEVICE]), numbers(host(pool))


DEVICE, HOST = st.integers(0, NUM_DEVICE - 1), st.integers(0, NUM_HOST - 1)


def to_distinct(sources, destinations):
    return st.lists(st.tuples(sources, destinations), max_size=4, unique_by=lambda pair: pair[1])


@settings(max_examples=100, derandomize=True)
@given(to_distinct(DEVICE, HOST), to_distinct(HOST, DEVICE), to_distinct(DEVICE, DEVICE))
def test_a_kind_reads_all_its_sources_before_it_writes(to_host, to_device, on_device):
    pool = make_pool()
    expected, on_host = state(pool)
    kinds = (to_host, expected, on_host), (to_device, on_host, expected), (on_device, expected, expected)
    for kind, read, written in kinds:
        held = list(read)
        for source, destination in kind:
            written[destination] = held[source]
    run_moves(pool, moves(to_host, to_device, on_device))
    assert state(pool) == (expected, on_host)


@pytest.mark.parametrize(("call", "shown"), shown_in("attention/refused_moves.txt", ">>>"))
def test_a_block_that_is_not_there_is_named_and_nothing_is_copied(call, shown):
    pool = make_pool()

    def moved(kind, wrong):
        lists = {"to_host": [(0, 0)], "to_device": [(1, 1)], "on_device": [(2, 3)]}
        lists[kind].append(wrong)
        run_moves(pool, moves(**lists))

    assert_refused(call, shown, {"moved": moved})
    assert state(pool) == ([10, 11, 12, 13, 14], [20, 21, 22, 23])


def test_where_the_kernel_that_copies_pages_does_not_run_torch_copies_them():
    """As on a GPU without a C compiler: Triton is there, and compiles nothing. Here it finds no GPU."""
    assert _kernel(torch.device("cpu")) is None
