"""Benchmarks of the memory layer and the scheduler alone, without a model. Knows clocks and how to load a scheduler evenly."""

from paged.bench.decode import DecodeStep, decode_step

__all__ = ["DecodeStep", "decode_step"]
