"""The adapters of vLLM where there is no vLLM: they import, say what is missing, and their naive model keeps its three rules."""

import pytest


@pytest.fixture
def root(repository, monkeypatch):
    """The folder that `conformance` is a package in."""
    monkeypatch.syspath_prepend(str(repository))
    return repository


def test_without_vllm_the_command_says_so_in_a_sentence(run_python, root):
    without = (
        f"import runpy, sys; sys.modules['vllm'] = None; sys.path.insert(0, {str(root)!r}); sys.argv = ['run.py']; "
    )
    without += "import conformance.vllm.programs; "
    ended = run_python("-c", without + "runpy.run_module('conformance.vllm.run', run_name='__main__')")
    assert ended.returncode == 1
    assert "vLLM is not installed for this Python" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_naive_model_of_vllm_hits_a_block_that_is_being_computed(root):
    from conformance.vllm.manager_rig import PublishFirstManager

    model = PublishFirstManager(4, 2)
    model.add(0, [0, 1, 2], None)
    model.allocate([0], [3])
    model.announce([0], lambda node, blocks: blocks[0])
    assert model.add(1, [0, 1, 3], None) == 2
    assert model.rows[1].table[0] is model.rows[0].table[0]


def test_the_naive_model_of_vllm_keeps_content_while_one_of_its_blocks_lives(root):
    from conformance.vllm.manager_rig import PublishFirstManager

    model = PublishFirstManager(3, 1)
    for row in (0, 1):
        # Neither finds the other's block: a prompt's last token is always computed.
        model.add(row, [7], None)
        model.allocate([row], [1])
        model.announce([row], lambda node, blocks: blocks[0])
        model.confirm()
    model.free([0, 1])
    assert (model.device.free, len(model.device.cached), model.device.used) == (1, 2, 0)
    model.add(2, [5, 6], None)
    model.allocate([2], [2])
    assert len(model.device.cached) == 1
    assert model.add(3, [7, 0], None) == 1
