"""The other ranks of a split model: processes that rank 0 starts, sends messages to, and ends.

Each process ends when its standard input closes, so none outlives the process of rank 0, however that ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from paged.base.uninterrupted import Uninterrupted
from paged.base.words import counted, short_cause
from paged.errors import InvalidConfig, PagedError, PagedWarning, RanksDiffer, RanksFailed
from paged.model.free_memory import free_bytes
from paged.model.hook import register
from paged.model.load_check import check_answers
from paged.model.loading import LoadedModel, check_dtype, config_of, silenced, usable_device
from paged.model.parallel.loading import Wanted, load_part
from paged.model.parallel.messages import Begin, Channel, Failed, Go, Hello, Join, Loaded, Made, Make, Read, versions
from paged.model.parallel.split import Part, check_split
from paged.model.parallel.sums import Sums, store_of_first
from paged.model.runner import Runner
from paged.model.threads import THREADS, usable_cores

LIMIT_S = 60.0
"""Seconds that a rank waits for another in a step, which all compute at the same time; a later one counts as hanging."""
LOAD_LIMIT_S = 1800.0
"""Seconds that a rank may take to import torch, and to read its part of the weights."""
_AT_A_TIME_S = 0.25
_CPU_ALLOCATOR = "DefaultCPUAllocator"


class Ranks:
    """The ranks from 1 on of a model that is split over `ranks`; their processes start with the object."""

    def __init__(self, ranks: int) -> None:
        self.count = ranks
        self.limit_s = LIMIT_S
        # The same on each rank, since all ranks together try how the model runs.
        self.threads = max(1, min(usable_cores() // ranks, torch.get_num_threads()))
        self.free: int | None = None
        self._why: str | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._store: Any = None
        self._device = torch.device("cpu")
        # The processes end when nothing refers to this object any more, and when the interpreter ends.
        self._close = weakref.finalize(self, _end, self._processes, self._channels)
        for rank in range(1, ranks):
            self._start(rank)

    def end(self, why: str) -> None:
        """End all ranks. Later calls raise RanksFailed with `why`."""
        if self._why is None:
            self._why = f"A model that is split over {self.count} ranks cannot go on: {why}."
        with Uninterrupted():
            self._close()

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks from 1 on."""
        return [each.pid for each in self._processes]

    def load(self, folder: Path, dtype: str, device: torch.device) -> LoadedModel:
        """Load the parts of a model, and return rank 0's. An interrupt ends all ranks. Raises as `load_part` does, RanksDiffer,
        and RanksFailed."""
        with self.guarded(interruptible=True):
            register()
            with silenced():
                check_answers(config_of(folder), folder)
            for rank, hello in enumerate(self._answers(Hello, LOAD_LIMIT_S), 1):
                self._check_same(rank, "has other versions", hello.versions, versions())
            self._store, self._device = store_of_first(), device
            for rank, channel in enumerate(self._channels, 1):
                where = f"cuda:{rank}" if device.type == "cuda" else str(device)
                channel.send(Join(self._store.port, str(folder), dtype, where), self.limit_s)
            model = load_part(Wanted(folder, Part(0, self.count), dtype, device), self._join)
            loaded = [each.free for each in self._answers(Loaded, LOAD_LIMIT_S)]
            own = free_bytes(device)
            # Ranks on one processor share its memory.
            share = self.count if device.type == "cpu" else 1
            self.free = min((each // share for each in (own, *loaded) if each is not None), default=None)
            return model

    def make(self, asked: Make, ours: Callable[[], Runner]) -> Runner:
        """Make each rank make a pool and a runner on it, at the same time as `ours` makes rank 0's, since all ranks together
        may try how the model runs. Return rank 0's. An interrupt ends all ranks. Raises what `ours` raises, and RanksFailed."""
        with self.guarded(interruptible=True):
            self.send(asked)
            runner = ours()
            self._answers(Made, LOAD_LIMIT_S)
            return runner

    def send(self, message: Any) -> None:
        """Send a message to each rank. Call it inside `guarded`, together with the work that the message starts."""
        for channel in self._channels:
            channel.send(message, self.limit_s)

    @contextmanager
    def guarded(self, *, interruptible: bool = False) -> Iterator[None]:
        """End all ranks on any error inside, since they would no longer be at the same step.

        What a connection or torch raises becomes RanksFailed, with the other ranks' causes; but an error that all ranks
        have, typed or for too little memory, stays as it is, and so does any other error. An interrupt waits for the end
        of the block, unless it is `interruptible`. Rank 0 has as many threads inside as the others."""
        if self._why is not None:
            raise RanksFailed(f"{self._why} Make a new engine.")
        with nullcontext() if interruptible else Uninterrupted(), THREADS.at_most(self.threads):
            try:
                yield
            except BaseException as error:
                with Uninterrupted():
                    self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End all ranks, and raise the error or RanksFailed, as `guarded` promises."""
        is_lost = isinstance(error, _LOST) or isinstance(error.__cause__, _LOST)
        causes = [str(error)] if isinstance(error, _Lost) else self._causes() if is_lost else []
        name = _shared_name(error)
        is_shared = name is not None and bool(causes) and all(name in each for each in causes)
        cause = "; ".join(causes) or short_cause(error)
        self._why = f"A model that is split over {self.count} ranks cannot go on: {cause}."
        self._close()
        if not is_lost or is_shared or isinstance(error, RanksDiffer):
            raise error
        raise RanksFailed(f"{self._why} All ranks were ended.") from error

    def _causes(self) -> list[str]:
        """Return the causes of ranks that failed; if any process ended without one, its status alone."""
        found: list[str] = []
        # A process takes a moment to end.
        until = time.monotonic() + 4 * _AT_A_TIME_S
        while not found and time.monotonic() < until:
            for rank, (process, channel) in enumerate(zip(self._processes, self._channels, strict=True), 1):
                with suppress(OSError, EOFError):
                    while not isinstance(message := channel.receive(0.01), Failed):
                        pass
                    found.append(f"rank {rank}: {message.why}")
                    continue
                if (status := process.poll()) is not None:
                    found.append(f"the process of rank {rank} ended with status {status}")
            time.sleep(0.05)
        return [each for each in found if "ended with status" in each] or found

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            variables = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
                "OMP_NUM_THREADS": str(self.threads),
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "paged.model.parallel.rank", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=variables,
                # Ctrl-C goes to rank 0 alone.
                start_new_session=True,
            )
        channel = Channel(ours, is_rank=False)
        self._processes.append(process)
        self._channels.append(channel)
        channel.send(Begin(rank, self.count, self.limit_s), self.limit_s)

    def _join(self, digest: str) -> Sums:
        for rank, read in enumerate(self._answers(Read, LOAD_LIMIT_S), 1):
            self._check_same(rank, "read other weights", {"digest": read.digest}, {"digest": digest})
        for channel in self._channels:
            channel.send(Go(), self.limit_s)
        return Sums(self._store, Part(0, self.count), self._device, self.limit_s)

    def _check_same(self, rank: int, what: str, theirs: dict[str, str], ours: dict[str, str]) -> None:
        for name in theirs.keys() | ours.keys():
            if theirs.get(name) != ours.get(name):
                raise RanksDiffer(f"rank {rank} {what}: {name} {theirs.get(name)}; rank 0 has {ours.get(name)}.")

    def _answers(self, kind: type[Any], limit_s: float) -> list[Any]:
        """Return the next message of each rank, of this kind. Raises _Lost."""
        return [self._answer(rank, channel, kind, limit_s) for rank, channel in enumerate(self._channels, 1)]

    def _answer(self, rank: int, channel: Channel, kind: type[Any], limit_s: float) -> Any:
        try:
            message = channel.receive(limit_s)
        except TimeoutError:
            raise _Lost(f"rank {rank} has not answered for {limit_s:g} s") from None
        if isinstance(message, Failed):
            raise _Lost(f"rank {rank}: {message.why}")
        if not isinstance(message, kind):
            raise _Lost(f"rank {rank} sent {type(message).__name__} in place of {kind.__name__}")
        return message


class _Lost(Exception):
    """A rank failed, or did not answer."""


# torch's collectives raise RuntimeError.
_LOST = (_Lost, OSError, EOFError, RuntimeError)


def _shared_name(error: BaseException) -> str | None:
    """Return the word by which other ranks report the same error, for errors that all ranks may have: a typed error, or too
    little memory. None for others: a RuntimeError on two ranks may be one that waited too long for the other."""
    if isinstance(error, PagedError | torch.OutOfMemoryError):
        return type(error).__name__
    # On a CPU torch's allocator raises a plain RuntimeError.
    return _CPU_ALLOCATOR if _CPU_ALLOCATOR in str(error) else None


def _end(processes: list[subprocess.Popen[bytes]], channels: list[Channel]) -> None:
    for channel in channels:
        channel.end.close()
    for process in processes:
        process.kill()
    for process in processes:
        assert process.stdin is not None, "it was asked for"
        with suppress(OSError):
            process.stdin.close()
        process.wait()


def load_split(folder: Path, ranks: int, *, dtype: str, device: str) -> tuple[LoadedModel, Ranks]:
    """Load a checkpoint folder over `ranks` ranks; `dtype` and `device` as for `load_model`. Return rank 0's part, and the
    other ranks.

    Raises before a rank starts: CheckpointNotFound, BrokenCheckpoint, UnsupportedModel for a model that cannot be split,
    UnevenSplit for a number that does not divide its heads, and InvalidConfig for more ranks than GPUs. Warns
    (PagedWarning) of more ranks than cores. Then raises RanksFailed, RanksDiffer, and what `load_part` raises."""
    check_dtype(dtype)
    where = usable_device(device)
    check_split(config_of(folder), ranks, folder)
    if not torch.distributed.is_available():
        raise InvalidConfig(f"tensor_parallel_size={ranks}: this torch was built without torch.distributed.")
    if where.type == "cuda":
        if (found := torch.cuda.device_count()) < ranks:
            raise InvalidConfig(
                f"tensor_parallel_size={ranks}: {counted(found, 'GPU')} can be seen here; each rank takes one."
            )
        if where.index:
            raise InvalidConfig(f'device="{device}": ranks take the GPUs from 0 on; name "cuda".')
        where = torch.device("cuda", 0)
    if where.type == "cpu" and usable_cores() < ranks:
        warnings.warn(
            f"tensor_parallel_size={ranks} on {counted(usable_cores(), 'core')}: ranks wait for each other; "
            f"{usable_cores()} would be faster.",
            PagedWarning,
            stacklevel=3,
        )
    others = Ranks(ranks)
    return others.load(folder, dtype, where), others
