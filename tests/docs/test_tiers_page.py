"""The page about tiers: its store works, and its limits are those of the code."""

import pytest

pytest.importorskip("torch")

from paged.engine.disk_tier import PATIENCE_S, PIECE_BYTES
from paged.storage.disk_store import _BATCH_BYTES, QUEUE_BYTES

PAGE = "docs/tiers.md"


def test_the_store_of_the_page_keeps_what_an_engine_computes(page, fences):
    (program,) = fences(page, "python")
    exec(compile(program, "tiers.md", "exec"), {"__name__": "tiers"})


def test_the_sizes_on_the_page_are_those_of_the_code(page):
    for num_bytes, words in (
        (QUEUE_BYTES, "at most {} MiB"),
        (_BATCH_BYTES, "{} MiB a process at most"),
        (PIECE_BYTES, "{} MiB at a time"),
    ):
        assert words.format(num_bytes // 2**20) in page
    assert PATIENCE_S == 10 and "after ten seconds" in page
