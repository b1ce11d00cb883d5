"""A policy of one's own is a few lines of data: here, small prompts' chunks beside decodes, and whole victims that go to the host.

python examples/own_policy.py
"""

from paged import POLICIES, Policy
from paged.study.simulator import Load, Scenario, run

MINE = Policy(
    name="mine",
    summary="decodes first, then chunks; the one with the fewest blocks goes to the host, whole",
    composition="decodes_first",
    victim="fewest_blocks",
    take="whole",
    preemption="swap",
    watermark=0.05,
)


def main() -> None:
    load = Load(trace="mooncake", limit=60, rate=20.0, prompts=1 / 32, outputs=1)
    for policy in (MINE, POLICIES["paged"], POLICIES["vllm"]):
        scenario = Scenario(load=load, policy=policy, blocks=120, host_blocks=120, max_tokens_per_step=256)
        result = run(scenario).result
        print(
            f"{result.policy:6} {result.throughput:7.1f} tokens/s, {result.preemptions.recompute:3} recomputed, "
            f"{result.preemptions.swap:3} swapped, longest gap {result.longest_gap_s.max:.2f} s"
        )


if __name__ == "__main__":
    main()
