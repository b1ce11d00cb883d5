"""The simulated scenarios in words: trace, model, device, memory, budget, versions."""

import platform
from collections.abc import Callable, Sequence

import numpy as np

from paged import __version__
from paged.study.hardware import Profile
from paged.study.hardware.measured_step import MeasuredStep
from paged.study.simulator import Outcome


def sentence(outcomes: Sequence[Outcome]) -> str:
    """Return what the file is, for a reader who got it from someone."""
    policies = list(dict.fromkeys(outcome.result.policy for outcome in outcomes))
    timed = "nothing here was timed on the device"
    cost_models = [outcome.scenario.device.cost_model() for outcome in outcomes]
    if any(isinstance(each, Profile) for each in cost_models):
        timed = "what a step takes is fitted to steps that were timed"
    elif any(isinstance(each, MeasuredStep) for each in cost_models):
        timed = "what a step takes comes from kernels or layers that were timed"
    runs = "1 simulation" if len(outcomes) == 1 else f"{len(outcomes):,} simulations"
    return (
        f"{runs} of {', '.join(policies)}: paged's own block manager and scheduler on a virtual clock, with a cost model in place of the "
        f"model. All times are virtual seconds; {timed}."
    )


def facts(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Return names and texts. If outcomes differ, a text has each value once, in order of appearance."""
    named: list[tuple[str, Callable[[Outcome], str]]] = [
        ("Trace", _trace),
        ("Applied to it", lambda outcome: "; ".join(outcome.applied) or "nothing"),
        ("Load", _load),
        ("Model and device", _device),
        ("Good to know", lambda outcome: "; ".join(outcome.scenario.device.notes())),
        ("Not modelled", lambda outcome: "; ".join(outcome.scenario.device.not_modelled())),
        ("KV memory", _memory),
        ("A step", _step),
        (
            "Price",
            lambda outcome: (
                f"{price:g} an hour for all devices" if (price := outcome.scenario.price_per_hour) is not None else ""
            ),
        ),
    ]
    found = []
    for name, text_of in named:
        texts = dict.fromkeys(text_of(outcome) for outcome in outcomes)
        if any(texts):
            found.append((name, " | ".join(filter(None, texts))))
    versions = f"paged {__version__}, Python {platform.python_version()}, numpy {np.__version__}"
    return [*found, ("Made with", versions)]


def _trace(outcome: Outcome) -> str:
    load, result = outcome.scenario.load, outcome.result
    source = "" if load.trace == result.trace else f" ({load.trace})"
    return f"{result.trace}{source}, {result.requests:,} requests, seed {load.seed}"


def _load(outcome: Outcome) -> str:
    load = outcome.scenario.load
    arrivals = f"arrivals at {outcome.load.pace(load.rate)}"
    if load.clients is not None:
        arrivals = f"a closed loop of {load.clients:,} clients; the trace's arrival times are left out"
    declared = "max_tokens is the exact output"
    if load.declared is not None:
        declared = f"max_tokens is what the context leaves, at most {load.declared:,}"
    return f"{arrivals}; {declared}"


def _device(outcome: Outcome) -> str:
    device = outcome.scenario.device
    if isinstance(profile := device.cost_model(), Profile):
        name = device.profile if profile.model is None else f"{profile.model.name} ({device.profile})"
        return f"{name}, by a profile of {profile.steps:,} timed steps" + (
            f": {profile.about}" if profile.about else ""
        )
    if (roof := device.roofline()) is None:
        formula = device.formula
        terms = ", ".join(f"{name} {getattr(formula, name):g}" for name in formula.__struct_fields__)
        return f"none: a step's time by formula ({terms})"
    split = "" if roof.tensor_parallel == 1 else f"{roof.tensor_parallel} × "
    return (
        f"{roof.model.name} in {roof.dtype} on {split}{roof.device.name}; steps are timed by {device.timed_by()}; the roofline below assumes "
        f"{roof.compute_efficiency:.0%} of the published FLOP/s and {roof.memory_efficiency:.0%} of the published bandwidth, "
        f"{1000 * roof.host_overhead_s:g} ms of host overhead a step"
    )


def _memory(outcome: Outcome) -> str:
    result, roof = outcome.result, outcome.scenario.device.roofline()
    text = f"{result.num_blocks:,} blocks of {result.block_size} tokens"
    if result.groups:
        text = f"{result.num_blocks:,} pages, blocks of {result.block_size} tokens; {'; '.join(result.groups)}"
    if roof is not None:
        total = result.num_blocks * result.block_size * roof.kv_bytes_per_token
        if result.groups:
            total = result.num_blocks * roof.page_bytes(result.block_size) * roof.tensor_parallel
        text += f" ({total / 1e9:,.1f} GB)"
    if result.host_blocks:
        text += f", {result.host_blocks:,} on the host"
    return f"{text}, prefix cache {'on' if result.prefix_caching else 'off'}"


def _step(outcome: Outcome) -> str:
    result = outcome.result
    budget = "any number of" if result.max_tokens_per_step is None else f"at most {result.max_tokens_per_step:,}"
    return f"{budget} tokens, at most {result.max_sequences:,} sequences"
