"""Memory for what is gathered: the right rows, whatever was asked for before, and of use inside inference mode and outside."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from paged.attention.workspace import Workspace

SOURCE = torch.arange(24.0).view(12, 2)


@pytest.mark.parametrize("count", [1, 3, 12, 40])
def test_it_gives_the_rows_that_are_asked_for(count):
    workspace = Workspace()
    for size in (2, count, 1):
        rows = torch.arange(size) % 12
        assert torch.equal(workspace.gathered("a", SOURCE, rows), SOURCE[rows])


def test_two_names_do_not_touch_each_other():
    workspace, rows = Workspace(), torch.tensor([3, 4])
    first = workspace.gathered("a", SOURCE, rows)
    workspace.gathered("b", SOURCE, rows + 1)
    assert torch.equal(first, SOURCE[rows])


def test_what_was_begun_in_inference_mode_goes_on_outside():
    workspace, rows = Workspace(), torch.tensor([1])
    with torch.inference_mode():
        workspace.gathered("a", SOURCE, rows)
    assert torch.equal(workspace.gathered("a", SOURCE, rows), SOURCE[rows])
