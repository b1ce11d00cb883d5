"""Memory on large pages: what is copied there is the same, on a line of the cache, and shares nothing."""

import pytest
import torch

from paged.model.native import large_pages
from paged.model.native.large_pages import empty, on_large_pages


@pytest.fixture(params=[True, False], ids=["large", "as the system has none"])
def _pages(request, monkeypatch):
    monkeypatch.setattr(large_pages, "_is_there", request.param and large_pages._is_there)


@pytest.mark.usefixtures("_pages")
def test_copies_are_whole_and_share_nothing():
    drawn = [torch.randn(rows, 33) for rows in (1, 7, 0, 100_000, 300_000)] + [torch.arange(5, dtype=torch.uint8)]
    copies = [on_large_pages(each) for each in drawn]
    for each, copy in zip(drawn, copies, strict=True):
        assert torch.equal(copy, each) and copy.dtype == each.dtype
        assert not each.numel() or (copy.data_ptr() != each.data_ptr() and copy.data_ptr() % 64 == 0)
    copies[0].fill_(1)
    assert all(torch.equal(copy, each) for each, copy in zip(drawn[1:], copies[1:], strict=True))


@pytest.mark.usefixtures("_pages")
def test_what_is_taken_lasts_as_long_as_its_tensor():
    kept = on_large_pages(torch.full((3,), 7.0))
    for _ in range(3):
        on_large_pages(torch.zeros(3_000_000))
    room = empty(100)
    room.fill_(1)
    assert len(room) == 100 and room.data_ptr() % 64 == 0 and kept.tolist() == [7.0] * 3


@pytest.mark.skipif(not large_pages._is_there, reason="this system has no large pages")
def test_a_copy_has_no_more_storage_than_its_numbers_and_memory_that_is_not_there_is_an_error():
    assert on_large_pages(torch.zeros(10)).untyped_storage().nbytes() == 40
    with pytest.raises(MemoryError, match="cannot be mapped"):
        empty(2**60)
