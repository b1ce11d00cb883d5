"""The simulator's examples run, and show what they are there to show."""

import pytest


@pytest.fixture
def said(run_python, repository):
    def lines(name):
        result = run_python(str(repository / "examples" / name))
        assert result.returncode == 0, result.stderr
        return [line.split() for line in result.stdout.splitlines()]

    return lines


def test_less_memory_costs_each_policy_throughput(said):
    _, *lines = said("memory_pressure.py")
    throughput = {(policy, int(blocks)): float(number) for policy, blocks, number, *_ in lines}
    for policy in ("paged", "vllm", "tgi", "orca-max"):
        assert throughput[policy, 250] < throughput[policy, 2000]
    assert throughput["orca-max", 500] < throughput["tgi", 500] < throughput["paged", 500]


def test_a_policy_of_ones_own_swaps_where_it_says_so(said):
    mine, paged, vllm = said("own_policy.py")
    assert [line[0] for line in (mine, paged, vllm)] == ["mine", "paged", "vllm"]
    assert mine[3] == "0"
    assert int(mine[5]) > 0
    assert int(vllm[3]) > 0


def test_batching_in_flight_is_faster_than_static(said):
    static, orca, paged = said("static_or_in_flight.py")
    assert float(static[1]) < float(orca[1]) < float(paged[1])
