"""Steps of the real engine, timed over batches that were designed for it, and the profile that is fitted to them."""

from paged.profiling.design import Chunk, Design, Scene, designed
from paged.profiling.machine import machine
from paged.profiling.step_times import KINDS, StepTimes, TimedStep, engine_for

__all__ = [
    "KINDS",
    "Chunk",
    "Design",
    "Scene",
    "StepTimes",
    "TimedStep",
    "designed",
    "engine_for",
    "machine",
]
