"""More blocks than memory: said before anything is allocated, with what would fit."""

import pytest
import torch

from paged import Engine
from paged.errors import InvalidConfig
from paged.model import free_memory
from paged.testing.tiny_model import tiny_model

CPU = torch.device("cpu")
# Two layers, K and V, 16 tokens, one head of eight numbers of four bytes.
BLOCK = 2 * 2 * 16 * 8 * 4


@pytest.mark.parametrize(
    ("num_blocks", "host_blocks", "message"),
    [
        (101, 0, "num_blocks 101 take 0.0 GiB; 0.0 GiB are free on cpu, which hold 100"),
        (50, 200, "host_blocks 200 take .* which hold 100"),
        (50, 51, "num_blocks and host_blocks together 101 take .* which hold 100"),
    ],
)
def test_it_is_said_how_many_would_fit_and_so_many_do(monkeypatch, num_blocks, host_blocks, message):
    # Before any of it is allocated.
    with pytest.raises(
        InvalidConfig, match=r"^num_blocks 2,000,000,000,000 take [\d,.]+ GiB; [\d,.]+ GiB are free on cpu"
    ):
        Engine(tiny_model(), num_blocks=2 * 10**12, block_size=16)
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 100 * BLOCK + 17)
    with pytest.raises(InvalidConfig, match=message):
        Engine(tiny_model(), num_blocks=num_blocks, host_blocks=host_blocks, block_size=16)
    assert Engine(tiny_model(), num_blocks=50, host_blocks=50, block_size=16).manager.num_blocks == 50


def test_what_is_free_is_the_least_that_anybody_says_and_of_other_devices_nothing_is_known(monkeypatch, tmp_path):
    memory, limit, used, cached = (tmp_path / name for name in ("meminfo", "max", "current", "stat"))
    monkeypatch.setattr(free_memory, "_MEMORY", memory)
    monkeypatch.setattr(free_memory, "_LIMITS", ((limit, used, cached),))
    assert free_memory.free_bytes(CPU) is None
    limit.write_text("max\n")
    used.write_text("3000\n")
    cached.write_text("anon 1000\ninactive_file 0\n")
    for file, text, free in (
        (memory, "MemTotal:  9000 kB\nMemAvailable:   5000 kB\n", 5000 * 1024),
        (limit, "1003000\n", 1_000_000),
        (used, "2000000\n", 0),
        (cached, "anon 1000\ninactive_file 1500000\n", 503_000),
    ):
        file.write_text(text)
        assert free_memory.free_bytes(CPU) == free
    assert free_memory.free_bytes(torch.device("meta")) is None
