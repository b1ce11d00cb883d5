"""A paged KV-cache memory manager and scheduler for LLM inference.

`import paged` is the door: every public name of the memory layer can be had from here. It loads nothing until a name is
used, so that reading `paged.__version__` costs neither numpy nor, one day, torch.

    BlockManager and Scheduler      the memory layer a serving engine embeds
    Request, Batch, Output          what goes in, what one step runs, what comes out
    LLM and Engine                  a model on top of them; these need the `engine` extra
    PagedError, paged.errors        the root of every typed error, and all of them
"""

from typing import TYPE_CHECKING

from paged import errors
from paged.base.extras import has_extra, import_with_extra
from paged.errors import PagedError

if TYPE_CHECKING:
    from paged.block_manager import (
        Admission,
        BlockManager,
        Cleared,
        Event,
        Hit,
        LayerGroup,
        MemoryStats,
        Moves,
        Removed,
        RestartPoint,
        Stored,
    )
    from paged.engine.async_engine import AsyncEngine
    from paged.engine.config import EngineConfig
    from paged.engine.engine import Engine
    from paged.engine.llm import LLM
    from paged.engine.results import Completion, CompletionOutput, EngineOutput, EngineStats, Logprob, Timings
    from paged.model.loading import LoadedModel, load_model
    from paged.sampling.params import SamplingParams
    from paged.sampling.search_params import BeamSearchParams, ContrastiveSearchParams
    from paged.sampling.structured import StructuredOutputsParams
    from paged.scheduler import (
        FINISH_REASONS,
        POLICIES,
        UNKNOWN_DRAFT,
        Batch,
        Costs,
        Drafts,
        Explanation,
        Hint,
        HintOutcome,
        Limits,
        Output,
        Outputs,
        Policy,
        PrefixExplanation,
        Request,
        RequestUsage,
        RequestView,
        Retention,
        Scheduler,
        SchedulerStats,
        SessionView,
        Status,
        register_policy,
    )

__version__ = "0.1.0"

__all__ = [
    "FINISH_REASONS",
    "LLM",
    "POLICIES",
    "UNKNOWN_DRAFT",
    "Admission",
    "AsyncEngine",
    "Batch",
    "BeamSearchParams",
    "BlockManager",
    "Cleared",
    "Completion",
    "CompletionOutput",
    "ContrastiveSearchParams",
    "Costs",
    "Drafts",
    "Engine",
    "EngineConfig",
    "EngineOutput",
    "EngineStats",
    "Event",
    "Explanation",
    "Hint",
    "HintOutcome",
    "Hit",
    "LayerGroup",
    "Limits",
    "LoadedModel",
    "Logprob",
    "MemoryStats",
    "Moves",
    "Output",
    "Outputs",
    "PagedError",
    "Policy",
    "PrefixExplanation",
    "Removed",
    "Request",
    "RequestUsage",
    "RequestView",
    "RestartPoint",
    "Retention",
    "SamplingParams",
    "Scheduler",
    "SchedulerStats",
    "SessionView",
    "Status",
    "Stored",
    "StructuredOutputsParams",
    "Timings",
    "load_model",
    "register_policy",
]

_PUBLIC_NAMES = {
    "paged.block_manager": (
        "Admission",
        "BlockManager",
        "Cleared",
        "Event",
        "Hit",
        "LayerGroup",
        "MemoryStats",
        "Moves",
        "Removed",
        "RestartPoint",
        "Stored",
    ),
    "paged.engine.config": ("EngineConfig",),
    "paged.engine.results": ("Completion", "CompletionOutput", "EngineOutput", "EngineStats", "Logprob", "Timings"),
    "paged.sampling.params": ("SamplingParams",),
    "paged.sampling.search_params": ("BeamSearchParams", "ContrastiveSearchParams"),
    "paged.sampling.structured": ("StructuredOutputsParams",),
    "paged.scheduler": (
        "FINISH_REASONS",
        "POLICIES",
        "UNKNOWN_DRAFT",
        "Batch",
        "Costs",
        "Drafts",
        "Explanation",
        "Hint",
        "HintOutcome",
        "Limits",
        "Output",
        "Outputs",
        "Policy",
        "PrefixExplanation",
        "Request",
        "RequestUsage",
        "RequestView",
        "Retention",
        "Scheduler",
        "SchedulerStats",
        "SessionView",
        "Status",
        "register_policy",
    ),
}

# These need the extra `engine`.
_ENGINE_NAMES = {
    "paged.engine.async_engine": ("AsyncEngine",),
    "paged.engine.engine": ("Engine",),
    "paged.engine.llm": ("LLM",),
    "paged.model.loading": ("LoadedModel", "load_model"),
}
_PUBLIC_NAMES.update(_ENGINE_NAMES)


if not TYPE_CHECKING:
    # Hidden from type checkers, which would otherwise take every misspelt name for an attribute.
    if not has_extra("engine"):
        # `from paged import *` brings what is there. A name that is asked for says what installs it.
        __all__ = [name for name in __all__ if not any(name in names for names in _ENGINE_NAMES.values())]

    def __getattr__(name: str) -> object:
        for home, public in _PUBLIC_NAMES.items():
            if name in public:
                value = getattr(import_with_extra(home, name), name)
                globals()[name] = value
                return value
        hint = f"; it is paged.errors.{name}" if hasattr(errors, name) else ""
        raise AttributeError(f"module 'paged' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
