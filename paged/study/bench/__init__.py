"""Benchmarks of the scheduler, of attention and of the engine on this machine.

What needs torch is in modules of its own: `attention`, `engine`, `step`.
"""

from paged.study.bench.decode import DecodeStep, decode_step
from paged.study.bench.workloads import WORKLOADS, Measured, workload

__all__ = ["WORKLOADS", "DecodeStep", "Measured", "decode_step", "workload"]
