"""A simulation held against what the real engine did with the same requests.

Given the seconds that the engine's steps took, it has to decide what the engine decided, entry by entry (`replay`).
Timed by a cost model, its figures have to be near the engine's (`predict`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paged import Batch, Costs
from paged.errors import InvalidConfig
from paged.study.hardware import CostModel, Spans, StepWork, Tiling
from paged.study.simulator.decisions import Decision, decision_of
from paged.study.simulator.recording import Recording
from paged.study.simulator.result import SimulationResult
from paged.study.simulator.simulation import Simulation
from paged.study.traces import Trace


class RecordedSeconds:
    """A cost model that plays recorded seconds, a step after the other, whatever the step is.

    Raises InvalidConfig for no steps, and `seconds` when there are no more.
    """

    tiling: ClassVar[Tiling | None] = None
    spans: ClassVar[Spans] = ()

    def __init__(self, seconds: Sequence[float], costs: Costs) -> None:
        if not seconds:
            raise InvalidConfig("the recording has no steps")
        self._seconds = seconds
        self._costs = costs
        self._num_played = 0

    def seconds(self, work: StepWork) -> Any:
        """Those of the next step."""
        if self._num_played == len(self._seconds):
            raise InvalidConfig(f"the recording has {len(self._seconds):,} steps; the simulation wants one more")
        self._num_played += 1
        return self._seconds[self._num_played - 1]

    def costs(self, block_size: int) -> Costs:
        """What the recorded scheduler expected."""
        return self._costs


def replay(recording: Recording, trace: Trace) -> list[Decision]:
    """The decisions of a simulation that is told the engine's seconds and tokens: `differences` with the recording's are to be none.

    Raises InvalidConfig for a recording of another trace, or without steps.
    """
    _check_is_of(recording, trace)
    prompts = trace.prompt_tokens

    def written(batch: Batch) -> NDArray[np.int32]:
        """The tokens that the engine's requests got at these places."""
        requests = [int(id) for id in batch.ids[batch.samples]]
        places = (batch.seq_lens[batch.samples] - prompts[requests]).tolist()
        tokens = (_token(recording.outputs[request], place) for request, place in zip(requests, places))
        return np.fromiter(tokens, np.int32, len(requests))

    simulation = Simulation(
        trace,
        recording.setup.scheduler(),
        RecordedSeconds(recording.seconds, recording.setup.costs),
        clients=recording.clients,
        prompt_of=recording.setup.prompt_of(trace),
        answer=written,
    )
    return [decision_of(step) for step in simulation.steps()]


def predict(recording: Recording, trace: Trace, cost_model: CostModel) -> SimulationResult:
    """What a simulation that knows nothing of the run but its setup says of it. Raises InvalidConfig for a recording of another trace."""
    _check_is_of(recording, trace)
    simulation = Simulation(trace, recording.setup.scheduler(), cost_model, clients=recording.clients)
    for _ in simulation.steps():
        pass
    return simulation.result()


def _token(output: Sequence[int], place: int) -> int:
    """Beyond what was recorded the logs differ, and say so themselves."""
    return output[place] if place < len(output) else 0


def _check_is_of(recording: Recording, trace: Trace) -> None:
    if len(recording.outputs) != len(trace):
        raise InvalidConfig(f"the recording has {len(recording.outputs):,} requests; the trace has {len(trace):,}")
