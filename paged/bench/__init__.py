"""Benchmarks of the scheduler, of attention and of the engine on this machine.

What needs torch is in modules of its own: `limits`, `floor`, `attention`, `engine`, `step`.
"""

from paged.bench.decode import DecodeStep, decode_step
from paged.bench.measured import Measured
from paged.bench.workloads import WORKLOADS, workload

__all__ = ["WORKLOADS", "DecodeStep", "Measured", "decode_step", "workload"]
