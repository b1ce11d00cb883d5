"""The call that puts a manager of continuous batching on our scheduler, and the managers that it refuses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from paged.errors import RefusedByPaged
from paged.integrations.transformers.block_store import BlockStore
from paged.integrations.transformers.plug_in import Scheduler
from paged.scheduler import POLICIES, Costs, Scheduler as Decisions

logger = logging.getLogger("paged.transformers")


class Installed:
    """A manager that runs on our scheduler.

    scheduler   the manager's scheduler since its last start or warm-up; None before
    """

    def __init__(self, manager: Any, policy: str, costs: Costs | None, clock: Callable[[], float]) -> None:
        config = manager.continuous_batching_config
        self.manager = manager
        self.scheduler: Scheduler | None = None
        self._policy, self._costs, self._clock, self._make = policy, costs, clock, manager._create_batch_processor
        # This is the manager's own copy. Asynchronous batching would have two batches out, and host blocks are ours.
        config.use_async_batching = False
        self._host_bytes, config.cpu_offload_space = (config.cpu_offload_space or 0) * 2**30, 0.0
        manager._create_batch_processor = self._processor

    @property
    def decisions(self) -> Decisions:
        """The paged.Scheduler behind it, with stats(), explain(id) and manager. Raises RefusedByPaged before the manager is started."""
        if self.scheduler is None:
            raise RefusedByPaged("the manager has not been started yet: there is nothing to look at.")
        return self.scheduler.decisions

    def _processor(self) -> Any:
        """Replace the manager's method: make its processor, with our scheduler."""
        processor = self._make()
        if processor.scheduler is not self.scheduler:
            theirs, config = processor.scheduler, self.manager.continuous_batching_config
            store = BlockStore(processor.cache, self._host_bytes)
            self.scheduler = processor.scheduler = Scheduler(
                processor.cache,
                theirs.max_requests_per_batch,
                store=store,
                policy=self._policy,
                costs=self._costs,
                prefix_caching=config.allow_block_sharing,
                fail=processor.output_router.fail_and_deliver,
                clock=self._clock,
            )
            logger.info(
                "paged's scheduler runs: policy %s, %d blocks of %d tokens, %d host blocks, prefix sharing %s.",
                self._policy,
                store.num_blocks,
                store.block_size,
                store.num_host_blocks,
                "on" if config.allow_block_sharing else "off",
            )
        return processor


def install(
    manager: Any,
    *,
    policy: str = "paged",
    costs: Costs | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Installed:
    """Put this manager, before it is started, on our scheduler and memory.

        manager = model.init_continuous_batching(generation_config=..., continuous_batching_config=...)
        install(manager)

    `model.generate_batch` uses it, too, until `model.destroy_cached_continuous_batching_manager()`. Its sizes, `allow_block_sharing` and
    `cpu_offload_space` count; `scheduler_type` and `safety_margin` are for transformers' own schedulers. `policy` is a name in paged.POLICIES, `costs`
    those of swapping and recomputing. Raises RefusedByPaged for a manager that is not supported, and changes nothing then.
    """
    _must_be_carried(manager, policy)
    installed = Installed(manager, policy, costs, clock)
    manager.model._cached_continuous_batching_manager = manager
    return installed


def _must_be_carried(manager: Any, policy: str) -> None:
    for wanted in (
        "continuous_batching_config",
        "_create_batch_processor",
        "batch_processor",
        "distributed_helper",
        "model",
    ):
        if not hasattr(manager, wanted):
            raise RefusedByPaged(
                f"install takes the manager that model.init_continuous_batching() returns; got {type(manager).__name__}, which has no {wanted}."
            )
    if policy not in POLICIES:
        raise RefusedByPaged(f"there is no policy {policy!r}; policies are {', '.join(POLICIES)}.")
    if POLICIES[policy].layout == "region":
        raise RefusedByPaged(
            f"policy {policy!r} reserves regions of memory, and transformers' cache is made of blocks."
        )
    if manager.batch_processor is not None:
        raise RefusedByPaged("this manager has been started or warmed up already; install comes before.")
    if manager.distributed_helper.tp_size > 1:
        raise RefusedByPaged(
            "tensor parallelism: each rank decides for itself, by its own clock, and they would not decide the same."
        )
    config = manager.model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    others = sorted(set(types) - {"full_attention"})
    if others:
        raise RefusedByPaged(
            f"layers of type {', '.join(others)} do not keep every token; this plug-in gives transformers one table a request."
        )
