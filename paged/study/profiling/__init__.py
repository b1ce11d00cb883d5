"""Steps of the real engine, timed over batches that were designed for it, and the profile that is fitted to them."""

from paged.study.profiling.design import Chunk, Design, Scene, designed
from paged.study.profiling.step_times import KINDS, StepTimes, TimedStep, engine_for

__all__ = [
    "KINDS",
    "Chunk",
    "Design",
    "Scene",
    "StepTimes",
    "TimedStep",
    "designed",
    "engine_for",
]
