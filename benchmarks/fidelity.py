"""The simulator held against the real engine on this machine, at 0.7, 1.4 and 3 times oversubscription.

    python benchmarks/fidelity.py --out benchmarks/results

A closed loop of clients = k × pool ÷ mean final length sends requests to the engine, and what it does is recorded: decisions, seconds, tokens. Then

(a) a simulation gets the recorded seconds and tokens: its decision log has to be the engine's, entry by entry, times included;
(b) a simulation is timed by a profile, which was fitted to designed steps and never saw these requests: makespan and the medians of TTFT and ITL
    have to lie within 5 %, or within the spread of the engine's own runs where that is more; 99th percentiles within 15 %.

The engine runs five times at each load, every time a new one. Rounds of the designed steps stand between the runs, so that a machine that slows
down slows both. Two models: the one that ships, and the shape of SmolLM-135M with random weights. Under ten minutes on two idle cores; nothing else
may run meanwhile. --quick is a small setting, to see whether everything works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from paged import Engine, LoadedModel, load_model
from paged.model.checkpoint import checkpoint_path
from paged.model.machine import machine
from paged.model.random_weights import random_model
from paged.study.hardware import Profile, model_named
from paged.study.profiling import KINDS, StepTimes, designed, engine_for
from paged.study.simulator import Recording, SimulationResult, differences, predict, record, replay
from paged.study.traces import Trace

OVERSUBSCRIPTIONS = (0.7, 1.4, 3.0)
RUNS = 5
WITHIN, P99_WITHIN = 0.05, 0.15
REQUESTS_A_CLIENT = 3
# Of the logarithm of lengths.
SIGMA = 0.5
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """A model, its memory and its load; lengths are log-normal means, in tokens.

    pool      blocks, and an eighth of them on the host
    requests  at least so many, and three for each client
    context   of the designed steps; longer than any request here
    profile_every
              so many rounds of runs go with one round of the designed steps
    """

    load: Callable[[], LoadedModel]
    pool: int
    prompt: int
    output: int
    requests: int
    max_tokens_per_step: int
    design_sequences: int
    context: int
    profile_every: int
    max_sequences: int = 96

    def engine(self, model: LoadedModel) -> Engine:
        """A new one, on an empty pool."""
        return Engine(
            model,
            num_blocks=self.pool,
            host_blocks=self.pool // 8,
            block_size=BLOCK_SIZE,
            max_tokens_per_step=self.max_tokens_per_step,
            max_sequences=self.max_sequences,
        )

    def step_times(self, model: LoadedModel) -> StepTimes:
        """The designed steps on an engine of their own."""
        design = designed(
            max_sequences=self.design_sequences,
            max_context=self.context,
            max_tokens_per_step=self.max_tokens_per_step,
            block_size=BLOCK_SIZE,
        )
        return StepTimes(engine_for(model, design), design)

    def load_of(self, oversubscription: float, seed: int) -> tuple[Trace, int]:
        """Requests that no designed step has anything of, and how many clients send them: their requests, full-grown, want so many times
        the pool."""
        rng = np.random.default_rng(1000 + seed)
        count = max(self.requests, self._requests_for(oversubscription, self.prompt + self.output))

        def lengths(mean: int) -> np.ndarray:
            drawn = rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
            return np.clip(drawn.astype(np.int64), 4, 3 * mean)

        trace = Trace.from_lengths(np.zeros(count), lengths(self.prompt), lengths(self.output))
        final = float((trace.prompt_tokens + trace.output_tokens).mean())
        return trace, max(1, round(oversubscription * self.pool * BLOCK_SIZE / final))

    def _requests_for(self, oversubscription: float, final: int) -> int:
        return round(REQUESTS_A_CLIENT * oversubscription * self.pool * BLOCK_SIZE / final)


CASES = {
    "embedded": Case(
        load=lambda: load_model(checkpoint_path()),
        pool=192,
        prompt=64,
        output=64,
        requests=100,
        max_tokens_per_step=128,
        design_sequences=56,
        context=384,
        profile_every=1,
    ),
    "135m": Case(
        load=lambda: random_model(model_named("smollm-135m")),
        pool=24,
        prompt=24,
        output=12,
        requests=24,
        max_tokens_per_step=64,
        design_sequences=24,
        context=128,
        profile_every=2,
    ),
}
QUICK = {
    "embedded": replace(CASES["embedded"], pool=48, prompt=24, output=16, requests=30, design_sequences=16, context=64),
    "135m": replace(CASES["135m"], pool=8, prompt=16, output=5, requests=4, design_sequences=4, context=64),
}

FIGURES: dict[str, Callable[[Any], float | None]] = {
    "makespan": lambda found: found.makespan_s,
    "TTFT p50": lambda found: found.ttft_s.p50,
    "ITL p50": lambda found: found.itl_s.p50,
    "TTFT p99": lambda found: found.ttft_s.p99,
    "ITL p99": lambda found: found.itl_s.p99,
}


def compared(runs: list[Recording], predicted: SimulationResult) -> list[dict[str, Any]]:
    """For each figure what the engine's runs had, what was predicted, and whether that is near enough."""
    found = []
    for name, of in FIGURES.items():
        seconds = [of(run) or 0.0 for run in runs]
        median = statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / median
        error = (of(predicted) or 0.0) / median - 1
        limit = P99_WITHIN if name.endswith("p99") else max(WITHIN, spread)
        found.append(
            {
                "figure": name,
                "engine_s": seconds,
                "median_s": median,
                "spread": spread,
                "predicted_s": of(predicted),
                "error": error,
                "limit": limit,
                "is_met": abs(error) <= limit,
            }
        )
    return found


def at_load(
    oversubscription: float, trace: Trace, clients: int, runs: list[Recording], profile: Profile
) -> dict[str, Any]:
    """What is kept of one load."""
    differing = [differences(run.decisions, replay(run, trace)) for run in runs]
    predicted = predict(runs[0], trace, profile)
    return {
        "oversubscription": oversubscription,
        "clients": clients,
        "requests": len(trace),
        "steps": [len(run.decisions) for run in runs],
        "steps_predicted": predicted.steps,
        "preemptions": [msgspec.to_builtins(run.preemptions) for run in runs],
        "logs_identical": [not sentences for sentences in differing],
        "first_difference": next((sentences[0] for sentences in differing if sentences), None),
        "figures": compared(runs, predicted),
    }


def measured(name: str, case: Case, num_runs: int) -> dict[str, Any]:
    """One model: rounds of designed steps and of runs at each load, in turns; then what the profile says of these runs."""
    model = case.load()
    loads = [(k, *case.load_of(k, seed)) for seed, k in enumerate(OVERSUBSCRIPTIONS)]
    times = case.step_times(model)
    times.warm_up()
    runs: list[list[Recording]] = [[] for _ in loads]
    for number in range(num_runs):
        if number % case.profile_every == 0:
            times.round()
        for (_, trace, clients), recordings in zip(loads, runs, strict=True):
            recordings.append(record(case.engine(model), trace, clients=clients))
        report(f"{name}: run {number + 1} of {num_runs}")
    profile = times.profile(f"benchmarks/fidelity.py on {machine()['processor']}", name=name)
    return {
        "model": name,
        "pool_blocks": case.pool,
        "host_blocks": case.pool // 8,
        "block_size": BLOCK_SIZE,
        "max_tokens_per_step": case.max_tokens_per_step,
        "profile": msgspec.to_builtins(profile),
        "profile_rounds": times.num_rounds,
        "timing_spread": {
            kind: statistics.median(step.spread for step in times.steps if step.kind == kind) for kind in KINDS
        },
        "loads": [at_load(*load, recordings, profile) for load, recordings in zip(loads, runs, strict=True)],
    }


def report(line: str) -> None:
    """Print the line at once, as progress."""
    print(line, file=sys.stderr, flush=True)


def page(document: dict[str, Any]) -> str:
    """The tables."""
    here = document["machine"]
    lines = [
        "# The simulator against the engine",
        "",
        f"`{document['command']}`: the engine ran {document['runs']} × at each load, torch on {document['threads']} of its threads; "
        f"{here['processor']}, {here['cores']} cores, {here['system']}, Python {here['python']}, numpy {here['numpy']}, torch {here['torch']}, "
        f"transformers {here['transformers']}, paged {here['paged']}. float32, batch-invariant.",
        "",
        "Closed loop, clients = k × pool ÷ mean final length. (a): the decision log of a simulation that is told the recorded seconds, against the engine's. "
        f"(b): figures by a profile that never saw these requests; goal: within {WITHIN:.0%}, or the spread of the engine's runs where that is more; p99 within {P99_WITHIN:.0%}. "
        "Spread: slowest run less fastest, ÷ median. Engine: median of the runs.",
    ]
    if document["quick"]:
        lines += ["", "**Tried with --quick: these figures mean nothing.**"]
    for case in document["cases"]:
        lines += _case_lines(case)
    return "\n".join(lines) + "\n"


def _case_lines(case: dict[str, Any]) -> list[str]:
    profile = case["profile"]
    pool = f"{case['pool_blocks']} blocks of {case['block_size']} tokens, {case['host_blocks']} on the host"
    lines = [
        "",
        f"## {case['model']}: {pool}, at most {case['max_tokens_per_step']} tokens a step",
        "",
        f"The profile: {profile['steps']} designed steps fitted, each timed {case['profile_rounds']} ×; its errors on {profile['held_out']['steps']} others:",
        "",
        "| steps | held out | median error | p90 | in total | spread of the timings, median |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kind in KINDS:
        if (error := profile["by_kind"].get(kind)) is not None:
            lines.append(
                f"| {kind} | {error['steps']} | {error['median']:.1%} | {error['p90']:.1%} | {error['total']:+.1%} | "
                f"{case['timing_spread'][kind]:.1%} |"
            )
    lines += [
        "",
        "| k | clients | steps | preemptions: recompute, swap | (a) logs identical |",
        "|--:|--:|--:|--:|--:|",
    ]
    for load in case["loads"]:
        first = load["preemptions"][0]
        lines.append(
            f"| {load['oversubscription']:g} | {load['clients']} | {load['steps'][0]} | {first['recompute']}, {first['swap']} | "
            f"{sum(load['logs_identical'])} of {len(load['logs_identical'])} |"
        )
    lines += [
        "",
        "| k | (b) figure | engine, s | predicted, s | error | spread | limit | met |",
        "|--:|---|--:|--:|--:|--:|--:|---|",
    ]
    for load in case["loads"]:
        for each in load["figures"]:
            lines.append(
                f"| {load['oversubscription']:g} | {each['figure']} | {each['median_s']:.4f} | {each['predicted_s'] or 0:.4f} | {each['error']:+.1%} | "
                f"{each['spread']:.1%} | {each['limit']:.1%} | {'yes' if each['is_met'] else '**no**'} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="one of the models")
    parser.add_argument("--runs", type=int, default=None, help=f"of the engine at each load (default {RUNS})")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch (default 1, which other programs disturb least)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small setting, to try the script; its figures mean nothing"
    )
    parser.add_argument("--out", type=Path, help="folder for fidelity.json and fidelity.md; default: print the page")
    arguments = parser.parse_args()
    usual = 2 if arguments.quick else RUNS
    num_runs = usual if arguments.runs is None else arguments.runs
    if num_runs < 1 or arguments.threads < 1:
        parser.error("--runs and --threads are at least 1")
    if arguments.out is not None and not arguments.out.is_dir():
        parser.error(f"--out: there is no folder {arguments.out}")
    torch.set_num_threads(arguments.threads)
    cases = QUICK if arguments.quick else CASES
    document = {
        "command": " ".join(["python", "benchmarks/fidelity.py", *sys.argv[1:]]),
        "machine": machine(),
        "threads": arguments.threads,
        "runs": num_runs,
        "quick": arguments.quick,
        "cases": [measured(name, cases[name], num_runs) for name in cases if arguments.only in (None, name)],
    }
    text = page(document)
    if arguments.out is not None:
        (arguments.out / "fidelity.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (arguments.out / "fidelity.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
