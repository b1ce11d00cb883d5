"""The kit's own parts, by hand-made cases: an oracle that nobody has tried is no oracle."""

import numpy as np
import pytest

from paged import BlockManager, Moves
from paged.testing import Capabilities, ShadowKV, capabilities_of


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


@pytest.mark.parametrize("build", ["build_engine(world)", "scheduler_in(world, max_model_len=None, vocabulary=4)"])
def test_a_kit_in_a_process_of_its_own_knows_the_policies_that_it_draws(run_python, build):
    program = f"from paged.testing.engine_world import *\nworld = EngineWorld(num_blocks=6, policy='tgi')\n{build}"
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
