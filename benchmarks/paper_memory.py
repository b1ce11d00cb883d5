"""The memory experiment of the vLLM paper (SOSP '23, figure 2): what share of KV memory holds tokens, by policy.

    python benchmarks/paper_memory.py --out benchmarks/results/paper-memory

OPT-13B on an A100 with 40 GB, lengths like ShareGPT's, context 2,048, a closed loop twice oversubscribed, no prefix cache. By the paper's
definition: slots with tokens ÷ the whole pool, weighted by time while requests wait. Orca's regions come from a buddy allocator.
"""

import argparse
from pathlib import Path

import msgspec
from study import clients_for, origin, table, written

from paged.study.simulator import Device, Load, Scenario, run_all

PAPER = {"orca-max": 20.4, "orca-pow2": 26.8, "orca-oracle": 38.2, "vllm": 96.3}


def main() -> None:
    parser = argparse.ArgumentParser(description="The memory experiment of the vLLM paper.")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write NAME.md and NAME.json", metavar="NAME")
    arguments = parser.parse_args()
    scenarios = []
    for policy in (*PAPER, "paged"):
        for seed in range(arguments.seeds):
            spec = f"synthetic:poisson,rate=2,requests={arguments.requests},lengths=sharegpt"
            scenario = Scenario(
                load=Load(trace=spec, seed=seed, context=2048, over_long="clip", declared=1024),
                device=Device(model="opt-13b", device="a100-40g"),
                policy=policy,
                prefix_caching=False,
                max_tokens_per_step=2048,
            )
            load = msgspec.structs.replace(scenario.load, clients=clients_for(scenario, 2.0))
            scenarios.append(msgspec.structs.replace(scenario, load=load))
    found: dict[str, list[float]] = {}
    waste: dict[str, list[float]] = {}
    outcomes = dict(run_all(scenarios, jobs=arguments.jobs))
    for place in range(len(scenarios)):
        result = outcomes[place].result
        found.setdefault(result.policy, []).append(result.memory_while_waiting.of_pool)
        waste.setdefault(result.policy, []).append(result.waste)
    rows = [
        (
            f"`{policy}`",
            PAPER.get(policy, "–"),
            f"{100 * sum(shares) / len(shares):.1f}",
            f"{100 * min(shares):.1f} to {100 * max(shares):.1f}",
            f"{100 * max(waste[policy]):.2f}",
        )
        for policy, shares in found.items()
    ]
    head = ("policy", "paper, %", "here, %", f"over {arguments.seeds} seeds", "recomputed, % of computed")
    lines = ["# The vLLM paper's memory experiment", "", *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), ""]
    lines += [*origin(), "", *table(head, rows)]
    print("\n".join(lines))
    if arguments.out is not None:
        written(arguments.out, lines, {"share_of_pool": found, "waste": waste})


if __name__ == "__main__":
    main()
