"""What memory pressure costs, policy against policy: the same requests on ever less memory.

python examples/memory_pressure.py
"""

from paged.study.simulator import Device, Load, Scenario, grid, run_all

POLICIES = ("paged", "vllm", "tgi", "orca-max")
POOLS = (2000, 500, 250)


def main() -> None:
    base = Scenario(
        load=Load(trace="azure", limit=80, rate=0.5, context=4096, over_long="clip"),
        device=Device(model="llama-2-13b", device="a100-40g"),
        max_tokens_per_step="own",
    )
    outcomes = dict(run_all(grid(base, policies=POLICIES, blocks=POOLS)))
    print("policy    blocks  tokens/s  p99 first  longest gap  preempted  waste  of the pool")
    for place in sorted(outcomes):
        result = outcomes[place].result
        preempted = result.preemptions.recompute + result.preemptions.swap
        print(
            f"{result.policy:8}  {result.num_blocks:6}  {result.throughput:8.1f}  {result.ttft_s.p99:7.1f} s  "
            f"{result.longest_gap_s.max:9.2f} s  {preempted:9}  {result.waste:5.1%}  {result.memory.of_pool:11.1%}"
        )


if __name__ == "__main__":
    main()
