"""Replay: a trace's arrivals and lengths through the real `BlockManager` and `Scheduler`, with a formula for time and a stand-in
for the model.

Knows traces, batches and virtual seconds. Does not know terminals, and makes no decision about memory: those are the scheduler's.
"""

from paged.replay.result import Percentiles, Preemptions, ReplayResult
from paged.replay.run import Replay, ReplayStuck, Step, replay
from paged.replay.step_time import StepTime

__all__ = ["Percentiles", "Preemptions", "Replay", "ReplayResult", "ReplayStuck", "Step", "StepTime", "replay"]
