"""transformers' continuous batching on our memory and our decisions: its models, kernels and sampling, our scheduler.

    manager = model.init_continuous_batching(generation_config=..., continuous_batching_config=...)
    install(manager)                       # one manager; transformers itself is left as it is
    model.generate_batch(prompts, max_new_tokens=64)

What works, what is refused and why: docs/integrations/transformers.md. Needs transformers; nothing else of paged
imports this.
"""

from paged.errors import RefusedByPaged, Unfinished, UnsupportedTransformers
from paged.integrations.transformers.needed import must_define_all, must_have_all

must_have_all()

from paged.integrations.transformers.installing import Installed, install  # noqa: E402
from paged.integrations.transformers.plug_in import Scheduler  # noqa: E402

must_define_all(Scheduler)

__all__ = ["Installed", "RefusedByPaged", "Scheduler", "Unfinished", "UnsupportedTransformers", "install"]
