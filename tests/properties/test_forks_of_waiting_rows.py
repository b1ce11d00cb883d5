"""A row that computed what another batch had pending, and was forked before it could look again: both know what their block is."""

import pytest

from paged.testing import ManagerRig, ManagerWorld

ALL = [0, 0, 0, 0, 1, 0, 0, 0]


@pytest.fixture
def rig():
    """Row 0 computed both blocks of ALL, which were cached when it began; they were evicted, and row 1 of the next batch had them pending,
    shared with row 2, when its own batch ended. Row 3 is its fork, and both blocks are confirmed by now."""
    rig = ManagerRig(ManagerWorld(num_blocks=8, block_size=4, host_blocks=4))
    rig.add(ALL, None)
    rig.allocate([0], [8])
    rig.confirm()
    rig.free([0])
    rig.add(ALL, None, False, True)
    rig.allocate([0], [8])
    rig.seal()
    rig.add([0] * 24, "another")
    rig.allocate([1], [24])
    rig.free([1])
    rig.add(ALL, None)
    rig.allocate([1], [8])
    rig.add([*ALL, 0], None)
    rig.allocate([2], [1])
    rig.seal()
    rig.confirm()
    rig.fork(0)
    rig.confirm()
    return rig


@pytest.mark.parametrize(("looks", "goes"), [(3, 0), (0, 3), (3, 3), (0, 0)])
def test_the_block_of_a_row_that_does_not_look_again_goes_to_the_host_as_content(rig, looks, goes):
    rig.extend_hit(looks)
    rig.swap_out([goes], 0)
    rig.free([0, 1, 2, 3])
    assert rig.manager.host.num_cached == 2
    rig.drain()
