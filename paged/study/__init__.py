"""Measurement and simulation: the simulator, devices, traces, reports, benchmarks, and policies of other systems.

    simulator    the real manager and scheduler on a virtual clock
    hardware     models and devices as data, and seconds of a step
    traces       requests of services, real and made up
    report       what simulations found, as a page with plots, CSV and Chrome traces (needs the extra `study`)
    profiling    steps of the real engine, timed, and a profile fitted to them
    bench        benchmarks of the scheduler, of attention and of the engine
    policies     systems that are modelled for comparison

`import paged.study`, or any part of it, registers these policies. An engine that serves needs none of this.
"""

from paged.study.policies import orca, static, tgi

__all__ = ["orca", "static", "tgi"]
