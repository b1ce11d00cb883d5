"""The script that asks two real replicas and two simulated ones: both get the same requests, and when routers count as different."""

import numpy as np
import pytest


@pytest.fixture(scope="module")
def script(benchmark_script):
    return benchmark_script("replicas_on_ray")


def test_the_replicas_get_the_prompts_that_are_simulated(script):
    trace, _ = script.load_of(1)
    first, again = (script.prompts(1, router) for router in ("random", "exact"))
    assert [*map(len, first)] == [*map(len, again)] == trace.prompt_tokens.tolist()
    assert max(map(len, first)) <= 900 and first != again
    simulated = [trace.prompt(number).tolist() for number in range(40)]
    for one in range(40):
        for other in range(one):
            assert shared(first[one], first[other]) == shared(simulated[one], simulated[other])


def shared(one, other):
    """Blocks of 16 in which two prompts begin alike."""
    equal = [a == b for a, b in zip(one, other)]
    return [*equal, False].index(False) // 16


@pytest.mark.parametrize(
    ("difference", "found"), [([2, 2.5, 3], 1), ([-2, -2.5, -3], -1), ([1, 2, 3], 0), ([-1, 2, 2], 0), ([0, 0, 0], 0)]
)
def test_routers_differ_where_the_mean_over_the_seeds_is_larger_than_the_range(script, difference, found):
    assert script.sign(np.array(difference)) == found
