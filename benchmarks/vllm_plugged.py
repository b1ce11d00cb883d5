"""Our scheduler inside vLLM for a harness that drives vLLM's own, so that one loop times both with vLLM's objects on every side.

The harness (`vllm_sched.py`, whose folder is in PEERS) builds vLLM's scheduler with its configuration; here ours is
put in its place, made of the same. Requests are vLLM's, what `schedule` returns is a `SchedulerOutput`, what `update`
returns are `EngineCoreOutputs`. vLLM hashes no prompts for ours, as the documentation advises; whether content is
shared, `caching`, is ours to say.
"""

from __future__ import annotations

import os
import sys
from typing import Any

sys.path.insert(0, os.environ["PEERS"])

from vllm_sched import VllmEngine

from paged.integrations.vllm import Scheduler


class Plugged(VllmEngine):
    """`paged.integrations.vllm.Scheduler` with the harness' method names; policy from PAGED_POLICY, `paged` without."""

    name = "paged in vLLM"

    def __init__(self, *, caching: bool, **given: Any) -> None:
        super().__init__(caching=False, **given)
        theirs = self.sched
        theirs.vllm_config.additional_config = {
            "paged": {"prefix_caching": caching, "policy": os.environ.get("PAGED_POLICY", "paged")}
        }
        self.sched = Scheduler(
            vllm_config=theirs.vllm_config,
            kv_cache_config=theirs.kv_cache_config,
            structured_output_manager=theirs.structured_output_manager,
            block_size=theirs.block_size,
            hash_block_size=theirs.block_size,
            log_stats=given.get("log_stats", False),
        )
        self.info |= {"scheduler": "paged.integrations.vllm.Scheduler", "policy": self.sched.decisions.policy.name}

    def lookup(self, request: Any) -> int:
        """Tokens of the prompt that are cached."""
        found = self.sched.manager.lookup(request.prompt_token_ids)
        return int(found.num_tokens)

    # Not timed by the harness.

    def fabricate(self, out: Any, token: int = 7) -> Any:
        """One token for each request that samples, in the runner's order, which is not ours."""
        batch = self.sched._out[-1][1]
        samples = dict(zip(batch.ids.tolist(), batch.samples.tolist(), strict=True))
        ids = list(out.num_scheduled_tokens)
        return self._Output(
            req_ids=ids,
            req_id_to_index={id: place for place, id in enumerate(ids)},
            sampled_token_ids=[[token] if samples[id] else [] for id in ids],
        )

    def scheduled(self, out: Any) -> tuple[int, int, int]:
        """Tokens, requests and preemptions of a step."""
        batch = self.sched._out[-1][1]
        return out.total_num_scheduled_tokens, len(out.num_scheduled_tokens), len(batch.preempted)

    def usage(self) -> tuple[float, float]:
        """Share of the blocks that are used, and computed tokens for each slot of those."""
        manager = self.sched.manager
        used = manager.device.num_used
        computed = int(manager.rows.num_computed[manager.rows.live].sum())
        return used / manager.num_blocks, computed / (used * manager.block_size) if used else 0.0
