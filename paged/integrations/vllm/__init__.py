"""vLLM on our memory and our decisions: its models, kernels, sampling and server, our scheduler.

    vllm serve MODEL --no-async-scheduling --scheduler-cls paged.integrations.vllm.Scheduler
    vllm serve MODEL --async-scheduling --scheduler-cls paged.integrations.vllm.AsyncScheduler
    LLM(MODEL, scheduler_cls="paged.integrations.vllm.Scheduler", additional_config={"paged": {"policy": "paged"}})

What works, what is refused and why: docs/integrations/vllm.md. Needs vLLM; nothing else of paged imports this.
"""

from paged.errors import RefusedByPaged, UnsupportedVllm
from paged.integrations.vllm.needed import must_define_all, must_have_all

must_have_all()

from paged.integrations.vllm.ahead import AsyncScheduler  # noqa: E402
from paged.integrations.vllm.host_tier import HostTier  # noqa: E402
from paged.integrations.vllm.options import Options  # noqa: E402
from paged.integrations.vllm.plug_in import Scheduler  # noqa: E402

must_define_all(AsyncScheduler, HostTier, Scheduler)

__all__ = ["AsyncScheduler", "Options", "RefusedByPaged", "Scheduler", "UnsupportedVllm"]
