"""Measurement and simulation: the simulator, devices, traces, reports, benchmarks, and policies of other systems.

    simulator    the real manager and scheduler on a virtual clock
    hardware     models and devices as data, and seconds of a step
    traces       requests of services, real and made up
    report       results of simulations as a page with plots, CSV and Chrome traces (needs the extra `study`)
    profiling    timed steps of the real engine, and a profile fitted to them
    bench        benchmarks of the scheduler, of attention and of the engine
    policies     models of other systems, for comparison
    accuracy     the effect of quantised weights, K and V on a model's answers

`import paged.study`, or any part of it, registers these policies. An engine that serves needs none of this.
"""

from paged.study.policies import orca, static, tgi

__all__ = ["orca", "static", "tgi"]
