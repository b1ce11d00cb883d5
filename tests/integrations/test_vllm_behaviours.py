"""The behaviours of a scheduler (admission, budget, preemption, order, ends, liveness), as the acceptance tests have them, asked through vLLM.

Each test of those files runs here once more with our plug-in in the scheduler's place: vLLM's requests go in, a runner of vLLM's kind computes,
vLLM's outputs come out. What vLLM's interface has no word for is left out, with the word; where ours differs from vLLM's own scheduler on
purpose stands in docs/integrations/vllm.md.
"""

from importlib import import_module
from inspect import signature
from types import FunctionType, MappingProxyType

import pytest
from acceptance import conftest as shared
from integrations.plugged import Plugged, PluggedAhead

from paged import POLICIES
from paged.testing.world import World

TAKEN_OVER = (
    "test_h_admission", "test_i_token_budget", "test_j_preemption", "test_k_order", "test_l_stopping", "test_p_liveness",
    "test_resumes_known",
)  # fmt: skip
CARRIED = {"policy", "max_tokens_per_step", "max_sequences", "max_model_len", "prefix_caching", "resumes_known"}
# Fields of a request that vLLM's have no word for, as they are when nobody uses them.
UNUSED = {"min_tokens": 0, "num_sequences": 1, "num_computed": 0}
UNUSED |= dict.fromkeys(("expected_tokens", "retention", "extra_key"))
# Calls of a scheduler that vLLM makes none of.
NO_CALLS = ("append", "cancel", "fork", "loaded", "finish")
LEFT_OUT = {
    "test_L3_tokens_beyond_the_limit_or_behind_a_stop_are_dropped": "vLLM's runner samples one token a row, and more only behind drafts",
    "test_H5_a_prompt_without_room_for_an_output_is_refused_with_the_numbers": "such a request ends with error, and the log has the numbers",
    "test_J19_a_preemption_is_counted_once_in_total_and_for_its_request": "vLLM's outputs carry no usage; it counts by events",
    "test_J25_a_request_preempted_often_enough_is_let_be": "vLLM's outputs carry no usage; it counts by events",
}
"""Tests that vLLM's interface has no place for, and why."""
SAME_AHEAD = ("test_i_token_budget", "test_k_order", "test_l_stopping")
"""What they ask is decided before any batch is told: once is enough."""

# What the acceptance tests share, but for what makes a scheduler.
globals().update(
    {name: found for name, found in vars(shared).items() if type(found).__name__ == "FixtureFunctionDefinition"}
)


class Asked(Plugged):
    """The plug-in, which skips the test that asks for what it has no word for, and for steps ahead."""

    def add(self, request, now=0.0):
        for name, unused in UNUSED.items():
            if getattr(request, name) != unused:
                pytest.skip(f"vLLM's requests have no {name}")
        super().add(request, now)

    def schedule(self, now=0.0, drafts=None):
        if drafts is not None:
            pytest.skip("drafts come by request")
        if self.out and not self.is_ahead:
            pytest.skip("one batch is out at a time")
        return super().schedule(now)

    def __getattr__(self, name):
        if name in NO_CALLS:
            pytest.skip(f"vLLM calls nothing like {name}")
        return super().__getattr__(name)


class AskedAhead(Asked, PluggedAhead):
    """The same for asynchronous scheduling."""


@pytest.fixture(params=[Asked, AskedAhead], ids=["one batch out", "two batches out"])
def make_scheduler(request, request_of):
    made = []

    def make(num_blocks, block_size=4, requests=MappingProxyType({}), **options):
        max_chunk = options.pop("max_chunk", None)
        if not options.get("host_blocks"):
            options.pop("host_blocks", None)
        for name in sorted(set(options) - CARRIED):
            pytest.skip(f"vLLM has no {name}")
        policy = options.get("policy", "paged")
        if not isinstance(policy, str):
            pytest.skip("options name a policy")
        if POLICIES[policy].layout == "region":
            pytest.skip("regions are refused")
        if POLICIES[policy].order == "fair":
            pytest.skip("no tenants are named")
        if options.get("resumes_known", request.param.is_ahead) != request.param.is_ahead:
            pytest.skip("of another class")
        world = World(
            num_blocks=num_blocks,
            block_size=block_size,
            **{"max_tokens_per_step": 2048, "max_sequences": 256, "policy": "paged"} | options,
        )
        made.append(request.param(world, scheduling_policy="priority", long_prefill_token_threshold=max_chunk or 0))
        for each in shared.requests_of(request_of, requests):
            made[-1].add(each)
        return made[-1]

    yield make
    for scheduler in made:
        assert scheduler.check() == []


ONE_BATCH = pytest.mark.parametrize("make_scheduler", [Asked], indirect=True, ids=["one batch out"])


def _taken_over():
    for module in (import_module(f"acceptance.{name}") for name in TAKEN_OVER):
        for name, found in vars(module).items():
            is_its_own = isinstance(found, FunctionType) and found.__module__ == module.__name__
            if name.startswith("test_") and is_its_own and "make_scheduler" in signature(found).parameters:
                if module.__name__.endswith(SAME_AHEAD):
                    ONE_BATCH(found)
                yield name, pytest.mark.skip(reason=LEFT_OUT[name])(found) if name in LEFT_OUT else found


globals().update(_taken_over())
