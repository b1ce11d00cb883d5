"""The kit's own parts, by hand-made cases: an oracle that nobody has tried is no oracle."""

from types import SimpleNamespace

import numpy as np
import pytest

from paged import BlockManager, Hint, Moves, Request
from paged.errors import InvalidConfig
from paged.testing import Capabilities, ManagerWorld, ShadowKV, Violation, World, capabilities_of, replay
from paged.testing.machines import num_examples
from paged.testing.shadow_kv import LateDevice


def test_capabilities_are_read_off_sizes_and_flags():
    assert capabilities_of(BlockManager(4, 2)) == Capabilities(host_tier=False)
    assert capabilities_of(BlockManager(4, 2, host_blocks=1, prefix_caching=False)) == Capabilities(prefix_cache=False)


def test_the_shadow_reports_a_slot_that_holds_another_context():
    shadow = ShadowKV(num_blocks=2, block_size=2)
    shadow.write(np.array([0, 1, 2]), shadow.contents.path("us", [5, 6, 7]))
    table = np.array([0, 1])
    assert shadow.mismatches(table, shadow.contents.path("us", [5, 6, 7]), "row 0") == []
    assert len(shadow.mismatches(table, shadow.contents.path("them", [5, 6, 7]), "row 0")) == 3
    assert len(shadow.mismatches(table, shadow.contents.path("us", [5, 9, 7]), "row 0")) == 2


def test_the_shadow_runs_the_kinds_of_moves_in_their_order():
    shadow = ShadowKV(num_blocks=3, block_size=1, host_blocks=2)
    shadow.device[:, 0], shadow.host[:, 0] = [10, 11, 12], [20, 21]
    pairs = [np.array([pair], np.int32) for pair in ((0, 0), (1, 0), (0, 2))]
    assert shadow.move(Moves(*pairs)) == []
    assert shadow.host[:, 0].tolist() == [10, 21]
    assert shadow.device[:, 0].tolist() == [21, 11, 21]


def test_two_writes_to_one_slot_are_reported():
    shadow = ShadowKV(num_blocks=1, block_size=2)
    assert "same slot" in shadow.write(np.array([1, 1]), np.array([0, 1]))[0]


def a_batch(length, tokens):
    """One row that computes its last token, in the first slot."""
    columns = {
        "rows": [0],
        "query_start_loc": [0, 1],
        "seq_lens": [length],
        "positions": [length - 1],
        "token_ids": [7],
    }
    arrays = {name: np.array(values) for name, values in columns.items()}
    return SimpleNamespace(
        **arrays, sequences=np.array([0]), ids=["a"], source_batches=np.array([-1]), slot_mapping=np.array([0])
    ), lambda id, sequence: (None, tokens)


def test_the_shadow_reports_a_length_beyond_what_a_sequence_knows_and_a_table_that_is_too_short():
    batch, known = a_batch(3, [7])
    found, attended = ShadowKV(2, 2).run(batch, {0: np.array([0, 1])}, known)
    assert (found, attended) == (["a/0 in row 0: context length 3; its sequence has 1 tokens"], {})
    batch, known = a_batch(3, [7, 7, 7])
    found, attended = ShadowKV(2, 2).run(batch, {0: np.array([0])}, known)
    assert (found, attended) == (["a/0 in row 0: block table [0] does not cover 3 tokens"], {})


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"table": lambda self, row: np.array([9])}, r"6: row 0 names blocks \[9\], of 4"),
        ({"slots": lambda self, row, start, stop: np.arange(9)}, r"row 0: slots\(0, 0, 2\) gave 9 of 2"),
    ],
)
def test_blocks_and_slots_that_cannot_be_are_a_violation_of_the_manager(changes, wrong):
    calls = [("add", ([0, 0], None)), ("allocate", ([0], [2]))]
    with pytest.raises(Violation, match=wrong):
        replay(ManagerWorld(4, 2, lag=9), calls, lambda world: type("Ours", (BlockManager,), changes)(4, 2))


def test_what_a_late_device_finds_is_told_by_the_call_that_makes_it_go_on():
    shadow = ShadowKV(2, 1)
    device = LateDevice(shadow, lag=1)
    # The row writes block 0 and reads block 1.
    assert device.write(1, np.array([0]), np.array([1]), shadow.contents.path(None, [5]), "row 0") == []
    assert "row 0: position 0 (block 1) should hold" in device.poison({1}, set())[0]


class NeverExpires(BlockManager):
    """The bug: what is retained stays so."""

    def expire(self, now):
        pass


def test_content_that_is_still_retained_after_the_last_retention_has_ended_is_a_violation():
    calls = [("add", ([0, 0], None)), ("allocate", ([0], [2])), ("confirm", ()), ("free", ([0],))]
    calls += [("retain", ([0], None, 1, 1)), ("expire", (1,))]
    with pytest.raises(Violation, match=r"node \(0,\) is kept at level 1, expected 0"):
        replay(ManagerWorld(2, 1), calls, lambda world: NeverExpires(2, 1))


class Doubled:
    """The bug: each reference counts twice."""

    def __init__(self, tier):
        self.tier = tier

    def __getattr__(self, name):
        return getattr(self.tier, name) * (1 + (name == "ref_counts"))


def test_a_wrong_ref_count_of_a_host_block_is_a_violation():
    def build(world):
        manager = BlockManager(2, 1, host_blocks=1)
        manager.host = Doubled(manager.host)
        return manager

    calls = [("add", ([0], None)), ("allocate", ([0], [1])), ("confirm", ()), ("swap_out", ([0], 0))]
    with pytest.raises(Violation, match="host block 0: ref count 2, expected 1"):
        replay(ManagerWorld(2, 1, host_blocks=1), calls, build)


@pytest.mark.parametrize("build", ["build_engine(world)", "scheduler_in(world, max_model_len=None, vocabulary=4)"])
def test_a_kit_in_a_process_of_its_own_knows_the_policies_that_it_draws(run_python, build):
    program = f"from paged.testing.engine_world import *\nworld = EngineWorld(num_blocks=6, policy='tgi')\n{build}"
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("asked", ["0", "many", ""])
def test_a_number_of_examples_in_the_environment_that_is_none_is_refused(asked, monkeypatch):
    monkeypatch.setenv("PAGED_EXAMPLES", asked)
    with pytest.raises(
        InvalidConfig, match=f"PAGED_EXAMPLES has to be a number of examples, at least 1; got '{asked}'."
    ):
        num_examples(5)


def test_a_request_that_was_refused_was_submitted_as_far_as_hints_and_aborts_say():
    refused = ("add", (Request(id="a", prompt=[0] * 99),))
    calls = [refused, ("hint", (Hint(action="retain", request="a"),)), ("abort", ("a",))]
    assert replay(World(num_blocks=4), calls, drain=True).events["refused"] == 1
