"""A worker in a process of its own: `python replay_steps.py FILES` runs the steps of each file, and compares the logits with those in it.

It knows the model, the size of the pool and the steps, and never loads a scheduler.
"""

import sys

import msgspec
import numpy as np
import torch

from paged.model.capacity import layered_pool_for, plan_of, pool_for
from paged.model.loading import load_model
from paged.model.runner import runner_for
from paged.model.step_input import StepInput
from paged.model.worker import Worker


class Recording(msgspec.Struct):
    """What a run was: of each step what was sent, its logits, as bytes of float32, and what each row sampled, of int32; of one that was taken
    back what was sent alone."""

    model: str
    num_blocks: int
    host_blocks: int
    block_size: int
    is_plain: bool
    steps: list[tuple[bytes, bytes | None, bytes | None]]


def pool_of(recording: Recording, model):
    if recording.is_plain:
        sizes = {"block_size": recording.block_size, "num_host_blocks": recording.host_blocks}
        return pool_for(model, num_blocks=recording.num_blocks, **sizes)
    plan = plan_of(model, block_size=recording.block_size)
    return layered_pool_for(model, plan, num_blocks=recording.num_blocks, num_host_blocks=recording.host_blocks)


def replay(path: str) -> None:
    with open(path, "rb") as file:
        recording = msgspec.msgpack.decode(file.read(), type=Recording)
    model = load_model(recording.model)
    worker = Worker(runner_for(model, pool_of(recording, model)))
    num_equal = num_unknown = 0
    for data, expected, sampled in recording.steps:
        step = StepInput.decoded(data)
        worker.begin(step)
        if expected is None:
            continue
        ready = worker.ready(step)
        logits = worker.logits(ready)
        assert logits.numpy().tobytes() == expected, f"the logits of step {step.number} are others"
        num_equal += len(logits)
        num_unknown += len(step.sources)
        worker.keep(step, np.frombuffer(sampled, np.int32))
    print(num_equal, num_unknown)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for path in sys.argv[1:]:
        replay(path)
    assert not any(name.startswith(("paged.scheduler", "paged.engine")) for name in sys.modules)
