"""transformers' continuous batching on our scheduler and memory, with its own models, kernels and sampling.

    manager = model.init_continuous_batching(generation_config=..., continuous_batching_config=...)
    install(manager)                       # this manager alone; transformers itself does not change
    model.generate_batch(prompts, max_new_tokens=64)

docs/integrations/transformers.md says what works, what is refused and why. Needs transformers.
"""

from paged.errors import RefusedByPaged, Unfinished, UnsupportedTransformers
from paged.integrations.transformers.needed import must_define_all, must_have_all

must_have_all()

from paged.integrations.transformers.installing import Installed, install  # noqa: E402
from paged.integrations.transformers.plug_in import Scheduler  # noqa: E402

must_define_all(Scheduler)

__all__ = ["Installed", "RefusedByPaged", "Scheduler", "Unfinished", "UnsupportedTransformers", "install"]
