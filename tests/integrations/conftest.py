"""Tests of the plug-ins find their helpers as `integrations`, and what drives vLLM as `conformance`."""

import sys
from pathlib import Path

from paged import POLICIES

for folder in (Path(__file__).parents[1], Path(__file__).parents[2]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def pytest_collection_modifyitems(items):
    """Of tests that are taken over, what they say of a second pool, of regions and of tenants is nothing that vLLM could be asked."""

    def is_asked(item):
        given = item.callspec.params if item.path.stem == "test_vllm_behaviours" and hasattr(item, "callspec") else {}
        policy = POLICIES.get(given.get("policy"))
        return not given.get("host_blocks") and (
            policy is None or (policy.layout != "region" and policy.order != "fair")
        )

    items[:] = [item for item in items if is_asked(item)]
