"""What the studies of policies share: devices, loads, where a page comes from, tables."""

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paged import POLICIES, Policy
from paged.study.simulator import Device, Load, Scenario
from paged.study.simulator.scenario import Budget

KNOWN = "paged, lengths known"
TOLD = (KNOWN, "orca-oracle")
"""Who knows lengths is no policy that one can have."""
LOADS = ("azure", "mooncake", "sharegpt")
CONTEXT, DECLARED = 4096, 1024
SETUPS = {
    "13B on 40 GB": Device(model="llama-2-13b", device="a100-40g"),
    "8B on 80 GB": Device(model="llama-3-8b", device="a100-80g"),
}


def policies() -> dict[str, Policy]:
    """All named ones that differ where no tenants are named, and ours with given lengths, by what they are called in tables."""
    alone = {name: policy for name, policy in POLICIES.items() if policy.order != "fair"}
    return alone | {KNOWN: msgspec.structs.replace(POLICIES["paged"], name=KNOWN, foresight="expected")}


def load_named(name: str, traces: Path, **changes: Any) -> Load:
    """Azure's or Mooncake's trace in `traces`, or lengths like ShareGPT's; over-long requests are clipped to the context.

    Mooncake's prompts are scaled to an eighth, so that most fit; what they share stays shared.
    """
    declared = {"context": CONTEXT, "over_long": "clip", "declared": DECLARED}
    match name:
        case "azure":
            load = Load(trace=str(traces / "azure_llm_2023_conv.csv"), **declared)
        case "mooncake":
            load = Load(trace=str(traces / "mooncake_conversation.jsonl"), prompts=1 / 8, **declared)
        case "sharegpt":
            load = Load(trace="synthetic:poisson,rate=1,requests=12000,lengths=sharegpt", **declared)
        case _:
            raise ValueError(f"no load is called {name}")
    return msgspec.structs.replace(load, **changes)


def reported(name: str, traces: Path, setup: str, requests: int, budget: Budget = "knee") -> Scenario:
    """A load's second half, of which about so many requests are kept, on a setup: what was tuned was tuned on the first."""
    load = load_named(name, traces, half="second")
    load = msgspec.structs.replace(load, keep=min(1.0, requests / len(load.build())))
    return Scenario(load=load, device=SETUPS[setup], max_tokens_per_step=budget, max_sequences=512)


def clients_for(scenario: Scenario, oversubscription: float) -> int:
    """Clients of a closed loop: so many times the pool ÷ the mean length of a request at its end."""
    trace = scenario.load.build()
    mean = float((trace.prompt_tokens + trace.output_tokens).mean())
    return max(1, round(oversubscription * scenario.num_blocks() * scenario.block_size / mean))


def saturated(scenario: Scenario) -> Scenario:
    """The same in a closed loop, three times oversubscribed."""
    load = msgspec.structs.replace(scenario.load, clients=clients_for(scenario, 3.0))
    return msgspec.structs.replace(scenario, load=load)


def titled(name: str) -> str:
    """A policy in a table: its name as code, or in words what it is."""
    return name if name == KNOWN else f"`{name}`"


def origin() -> list[str]:
    """Where figures were taken, and by which command, as Markdown."""
    return [
        f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores ({platform.machine()}). Virtual time by the roofline (13B) and by measured kernels of the A100 (8B on 80 GB);",
        "the same command gives the same figures anywhere, but for those of the wall clock.",
        "",
        "```",
        " ".join(["python", *(str(part) for part in sys.argv)]),
        "```",
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)]


def written(out: Path, lines: Sequence[str], figures: Any) -> None:
    """`out`.md for people, `out`.json with all that was found."""
    out.with_suffix(".md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    out.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
