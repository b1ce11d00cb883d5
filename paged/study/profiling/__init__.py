"""Timed steps of the real engine over designed batches, and the profile that is fitted to them."""

from paged.study.profiling.design import designed
from paged.study.profiling.step_times import KINDS, StepTimes, TimedStep, engine_for

__all__ = ["KINDS", "StepTimes", "TimedStep", "designed", "engine_for"]
