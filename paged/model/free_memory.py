"""The free memory of a device, and a check that a pool fits into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paged.errors import InvalidConfig

if TYPE_CHECKING:
    import torch

_MEMORY = Path("/proc/meminfo")
# Of both versions of control groups: the limit, the memory in use, and statistics on how much of it can be reclaimed.
_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_LIMITS = (
    (_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat"),
    (_V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat"),
)


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a device; None if not known."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return free_bytes_of_host() if device.type == "cpu" else None


def free_bytes_of_host() -> int | None:
    """Return the free bytes of this machine's memory, within the limits of control groups; None if not known."""
    found = [each for each in (_of_machine(), *(_of_group(*files) for files in _LIMITS)) if each is not None]
    return min(found, default=None)


def check_fits(
    num_blocks: int,
    host_blocks: int,
    block_bytes: int,
    device: torch.device,
    *,
    ranks: int = 1,
    free: int | None = None,
) -> None:
    """Raise InvalidConfig if blocks of `block_bytes` on the device and on the host do not fit into free memory.

    Each rank of a split model has as many blocks. Ranks share a host; `free` has the free bytes on the device of the rank with the fewest.
    """
    import torch

    host = torch.device("cpu")
    on_device, on_host = free_bytes(device), free_bytes(host)
    if ranks > 1:
        on_device, on_host = free, None if on_host is None else on_host // ranks
    wanted = [("num_blocks", num_blocks, device, on_device), ("host_blocks", host_blocks, host, on_host)]
    if device.type == "cpu":
        # Both lie in one memory.
        wanted.append(("num_blocks and host_blocks together", num_blocks + host_blocks, host, on_host))
    for name, count, where, free in wanted:
        if free is not None and count * block_bytes > free:
            raise InvalidConfig(
                f"{name} {count:,} take {count * block_bytes / 2**30:,.1f} GiB; {free / 2**30:,.1f} GiB are free on {where}{' for each rank' if ranks > 1 else ''}, "
                f"which hold {free // block_bytes:,}."
            )


def _of_machine() -> int | None:
    try:
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_group(limit: Path, used: Path, statistics: Path) -> int | None:
    try:
        # Cached files count as used, and can be reclaimed.
        lines = (line.split() for line in statistics.read_text(encoding="ascii").splitlines())
        cached = next((int(value) for name, value in lines if name in ("inactive_file", "total_inactive_file")), 0)
        taken = max(0, int(used.read_text(encoding="ascii")) - cached)
        return max(0, int(limit.read_text(encoding="ascii")) - taken)
    except (OSError, ValueError):
        # There is no limit, or it is "max".
        return None
