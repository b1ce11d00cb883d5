"""What no other test noticed when it was changed a little (`make mutants`)."""

from paged.testing import ManagerRig, ManagerWorld


def test_pending_content_does_not_give_way_while_content_stands_on_it_whose_row_is_gone():
    rig = ManagerRig(ManagerWorld(num_blocks=8, block_size=2))
    rig.add([0])
    rig.allocate([0], [1])
    rig.seal()
    # Its next token is the other rows' prompt, and nobody knows yet.
    rig.allocate([0], [0], [[0]])
    rig.seal()
    rig.add([0, 0, 1])
    rig.allocate([1], [3])
    rig.seal()
    rig.add([0, 0, 1, 1, 0])
    rig.allocate([2], [3])
    rig.seal()
    rig.free([2])
    rig.append(0, [0])
    for _ in range(4):
        rig.confirm()
    rig.drain()
    assert rig.events["pending node gave way"] == 0
