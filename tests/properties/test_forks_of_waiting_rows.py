"""A row that computed what another batch had pending, and was forked before it could look again: both know what their block is."""

import pytest

from paged.testing import ManagerRig, ManagerWorld

BEGINNING = [0, 0, 0, 0]
ALL = [0, 0, 0, 0, 1, 0, 0, 0]


@pytest.fixture
def rig():
    """Row 1 computed both blocks of ALL beside two other batches, of which one had the first pending and one the second; row 4 is its fork,
    and both blocks are confirmed by now."""
    rig = ManagerRig(ManagerWorld(num_blocks=8, block_size=4, host_blocks=4))
    rig.add(BEGINNING, None)
    rig.allocate([0], [4])
    rig.seal()
    rig.add(ALL, None)
    rig.allocate([1], [8])
    rig.seal()
    rig.confirm()
    rig.add(ALL, None)
    rig.allocate([2], [4])
    rig.add([*ALL, 0], None)
    rig.confirm()
    rig.fork(1)
    rig.confirm()
    return rig


@pytest.mark.parametrize(("looks", "goes"), [(4, 1), (1, 4), (4, 4), (1, 1)])
def test_the_block_of_whoever_does_not_look_again_goes_to_the_host_as_content(rig, looks, goes):
    rig.extend_hit(looks)
    rig.swap_out([goes], 0)
    rig.free([0, 1, 2, 3, 4])
    assert rig.manager.host_cached == 2
    rig.drain()
