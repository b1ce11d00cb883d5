"""Static against in-flight batching: a batch that waits for its longest answer, and one that others join at every step.

python examples/static_or_in_flight.py
"""

from paged.study.simulator import Device, Load, Scenario, run


def main() -> None:
    load = Load(trace="azure", limit=80, rate=0.5, context=4096, over_long="clip")
    device = Device(model="llama-2-13b", device="a100-40g")
    for policy in ("static", "orca-max", "paged"):
        result = run(Scenario(load=load, device=device, policy=policy, max_tokens_per_step="own")).result
        print(
            f"{policy:9} {result.throughput:6.1f} tokens/s, {result.row_occupancy * result.max_sequences:5.1f} sequences in flight, "
            f"{result.memory.of_pool:5.1%} of the pool holds tokens, half of the first tokens within {result.ttft_s.p50:.1f} s"
        )


if __name__ == "__main__":
    main()
