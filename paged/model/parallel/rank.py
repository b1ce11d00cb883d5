"""The process of a rank from 1 on: `python -m paged.model.parallel.rank FD`, a socket to rank 0.

It has a worker with tables of its own, and runs each step at the same time as rank 0, which sends it. It has no scheduler.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import torch

from paged.base.words import short_cause
from paged.model.capacity import layered_pool_for, plan_of, pool_for, with_kv_dtype
from paged.model.free_memory import free_bytes
from paged.model.loading import LoadedModel
from paged.model.parallel.loading import Wanted, load_part
from paged.model.parallel.messages import (
    Begun,
    Channel,
    Failed,
    Go,
    Hello,
    Join,
    Loaded,
    Made,
    Make,
    Read,
    Run,
    versions,
)
from paged.model.parallel.split import Part
from paged.model.parallel.sums import Sums, store_at
from paged.model.runner import Runner, runner_for
from paged.model.step_input import StepInput
from paged.model.worker import Worker

_NO_SOURCES = np.zeros((0, 3), np.int64)


def serve(channel: Channel) -> None:
    """Load a part, and run steps until rank 0 is gone. Raises EOFError then."""
    begin = channel.receive()
    channel.send(Hello(versions()))
    part, join = Part(begin.rank, begin.ranks), channel.receive()
    assert isinstance(join, Join), "it comes first"
    device = torch.device(join.device)

    def joined(digest: str) -> Sums:
        channel.send(Read(digest))
        go = channel.receive()
        assert isinstance(go, Go), "rank 0 has read, too"
        return Sums(store_at(join.port, begin.limit_s), part, device, begin.limit_s)

    model = load_part(Wanted(Path(join.folder), part, join.dtype, device), joined)
    channel.send(Loaded(free_bytes(device)))
    worker = Worker(_made(model, channel.receive()))
    channel.send(Made())
    _run_steps(channel, worker)


def _made(model: LoadedModel, asked: Make) -> Runner:
    model, kv_dtype = with_kv_dtype(model, asked.kv_cache_dtype, asked.kv_cache_dtype_skip_layers)
    sizes: dict[str, Any] = {
        "num_blocks": asked.num_blocks,
        "num_host_blocks": asked.host_blocks,
        "kv_dtype": kv_dtype,
    }
    if asked.is_planned:
        pool = layered_pool_for(model, plan_of(model, block_size=asked.block_size, kv_dtype=kv_dtype), **sizes)
    else:
        pool = pool_for(model, block_size=asked.block_size, **sizes)
    return runner_for(model, pool, backend=asked.backend, batch_invariant=asked.batch_invariant, enforce_eager=True)


def _run_steps(channel: Channel, worker: Worker) -> None:
    begun: dict[int, StepInput] = {}
    while True:
        message = channel.receive()
        if isinstance(message, Begun):
            step = StepInput.decoded(message.step)
            worker.begin(step)
            begun = {number: each for number, each in begun.items() if number >= step.oldest}
            begun[step.number] = step
            continue
        assert isinstance(message, Run), "nothing else comes once it is made"
        # Rank 0 has filled in all tokens.
        token_ids = np.frombuffer(message.token_ids, np.int32)
        step = msgspec.structs.replace(begun.pop(message.number), token_ids=token_ids, sources=_NO_SOURCES)
        lengths = None if message.lengths is None else np.frombuffer(message.lengths, np.int64)
        none = np.zeros(len(token_ids), np.bool_)
        others, stateful = (
            none if each is None else np.frombuffer(each, np.bool_) for each in (message.others, message.stateful)
        )
        worker.read(worker.ready(step), others, stateful, lengths)


def _end_with_rank_0() -> None:
    """Exit when rank 0 does, whatever this process does then. Its standard input is a pipe of rank 0, which writes nothing."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Serve rank 0 over the socket whose file descriptor the command line has."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Rank 0 handles these signals, and ends this process.
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_end_with_rank_0, daemon=True).start()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), is_rank=True)
    status = 0
    try:
        serve(channel)
    except EOFError:
        # Rank 0 is done.
        pass
    except Exception as error:
        status = 1
        with suppress(OSError):
            channel.send(Failed(f"{type(error).__name__}: {short_cause(error)}"), 1.0)
    # Without waiting for torch's threads.
    os._exit(status)


if __name__ == "__main__":
    main()
