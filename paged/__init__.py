"""A paged KV-cache memory manager and scheduler for LLM inference.

`import paged` is the door: every public name of the memory layer can be had from here. It loads nothing until a name is
used, so that reading `paged.__version__` costs neither numpy nor, one day, torch.

    BlockManager and Scheduler      the memory layer a serving engine embeds
    Request, Batch, Output          what goes in, what one step runs, what comes out
    LLM and Engine                  a model on top of them; these need the `engine` extra
    PagedError, PagedWarning        the roots of every typed error and warning here
"""

from typing import TYPE_CHECKING

from paged.extras import MissingExtra, has_extra, import_with_extra

if TYPE_CHECKING:
    from paged.async_engine import AsyncEngine, DeadlineExceeded, EngineClosed
    from paged.attention import AttentionError, BuildFailed, UnknownBackend, UnsupportedByBackend
    from paged.block_manager import (
        Admission,
        BlockManager,
        CannotCopy,
        Cleared,
        DuplicateRow,
        Event,
        Hit,
        InvalidConfig,
        InvalidNamespace,
        InvalidTokens,
        MemoryClaimed,
        MemoryStats,
        Moves,
        NothingInFlight,
        OutOfBlocks,
        PagedError,
        Removed,
        RowInFlight,
        RowSwapped,
        Stored,
        UnknownContent,
        UnknownRow,
    )
    from paged.config import EngineConfig
    from paged.engine import Engine
    from paged.errors import PagedWarning
    from paged.llm import LLM
    from paged.model.chat import InvalidChat
    from paged.model.errors import (
        BrokenCheckpoint,
        BudgetTooSmall,
        CheckpointNotFound,
        ModelError,
        UnsupportedModel,
    )
    from paged.model.loading import LoadedModel, load_model
    from paged.results import Completion, CompletionOutput, EngineOutput, EngineStats, Logprob, Timings
    from paged.sampling.adjustments import CannotAdjust, GrammarFailed, ProcessorFailed
    from paged.sampling.errors import InvalidSampling
    from paged.sampling.params import SamplingParams
    from paged.sampling.search_params import BeamSearchParams, ContrastiveSearchParams
    from paged.sampling.structured import StructuredOutputsParams
    from paged.scheduler import (
        FINISH_REASONS,
        POLICIES,
        UNKNOWN_DRAFT,
        Batch,
        BatchEnded,
        BatchError,
        BatchOutOfOrder,
        Costs,
        Drafts,
        DuplicateRequest,
        Explanation,
        Forecast,
        ForeignBatch,
        InvalidRequest,
        Limits,
        NeverFits,
        Output,
        Outputs,
        Policy,
        Request,
        RequestInFlight,
        RequestUsage,
        RequestView,
        Retention,
        Scheduler,
        SchedulerInUse,
        SchedulerStats,
        Status,
        TooManyOutstanding,
        UnknownPolicy,
        UnknownRequest,
        WaitingFull,
        WrongDrafts,
        WrongTokens,
    )
    from paged.steps import EngineFailed
    from paged.turns import EngineInUse

__version__ = "0.1.0"

__all__ = [
    "FINISH_REASONS",
    "LLM",
    "POLICIES",
    "UNKNOWN_DRAFT",
    "Admission",
    "AsyncEngine",
    "AttentionError",
    "Batch",
    "BatchEnded",
    "BatchError",
    "BatchOutOfOrder",
    "BeamSearchParams",
    "BlockManager",
    "BrokenCheckpoint",
    "BudgetTooSmall",
    "BuildFailed",
    "CannotAdjust",
    "CannotCopy",
    "CheckpointNotFound",
    "Cleared",
    "Completion",
    "CompletionOutput",
    "ContrastiveSearchParams",
    "Costs",
    "DeadlineExceeded",
    "Drafts",
    "DuplicateRequest",
    "DuplicateRow",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineFailed",
    "EngineInUse",
    "EngineOutput",
    "EngineStats",
    "Event",
    "Explanation",
    "Forecast",
    "ForeignBatch",
    "GrammarFailed",
    "Hit",
    "InvalidChat",
    "InvalidConfig",
    "InvalidNamespace",
    "InvalidRequest",
    "InvalidSampling",
    "InvalidTokens",
    "Limits",
    "LoadedModel",
    "Logprob",
    "MemoryClaimed",
    "MemoryStats",
    "MissingExtra",
    "ModelError",
    "Moves",
    "NeverFits",
    "NothingInFlight",
    "OutOfBlocks",
    "Output",
    "Outputs",
    "PagedError",
    "PagedWarning",
    "Policy",
    "ProcessorFailed",
    "Removed",
    "Request",
    "RequestInFlight",
    "RequestUsage",
    "RequestView",
    "Retention",
    "RowInFlight",
    "RowSwapped",
    "SamplingParams",
    "Scheduler",
    "SchedulerInUse",
    "SchedulerStats",
    "Status",
    "Stored",
    "StructuredOutputsParams",
    "Timings",
    "TooManyOutstanding",
    "UnknownBackend",
    "UnknownContent",
    "UnknownPolicy",
    "UnknownRequest",
    "UnknownRow",
    "UnsupportedByBackend",
    "UnsupportedModel",
    "WaitingFull",
    "WrongDrafts",
    "WrongTokens",
    "load_model",
]

_PUBLIC_NAMES = {
    "paged.attention": ("AttentionError", "BuildFailed", "UnknownBackend", "UnsupportedByBackend"),
    "paged.block_manager": (
        "Admission",
        "BlockManager",
        "CannotCopy",
        "Cleared",
        "DuplicateRow",
        "Event",
        "Hit",
        "InvalidConfig",
        "InvalidNamespace",
        "InvalidTokens",
        "MemoryClaimed",
        "MemoryStats",
        "Moves",
        "NothingInFlight",
        "OutOfBlocks",
        "PagedError",
        "Removed",
        "RowInFlight",
        "RowSwapped",
        "Stored",
        "UnknownContent",
        "UnknownRow",
    ),
    "paged.scheduler": (
        "FINISH_REASONS",
        "POLICIES",
        "UNKNOWN_DRAFT",
        "Batch",
        "BatchEnded",
        "BatchError",
        "BatchOutOfOrder",
        "Costs",
        "Drafts",
        "DuplicateRequest",
        "Explanation",
        "Forecast",
        "ForeignBatch",
        "InvalidRequest",
        "Limits",
        "NeverFits",
        "Output",
        "Outputs",
        "Policy",
        "Request",
        "RequestInFlight",
        "RequestUsage",
        "RequestView",
        "Retention",
        "Scheduler",
        "SchedulerInUse",
        "SchedulerStats",
        "Status",
        "TooManyOutstanding",
        "UnknownPolicy",
        "UnknownRequest",
        "WaitingFull",
        "WrongDrafts",
        "WrongTokens",
    ),
    "paged.config": ("EngineConfig",),
    "paged.errors": ("PagedWarning",),
    "paged.model.chat": ("InvalidChat",),
    "paged.model.errors": (
        "BrokenCheckpoint",
        "BudgetTooSmall",
        "CheckpointNotFound",
        "ModelError",
        "UnsupportedModel",
    ),
    "paged.results": ("Completion", "CompletionOutput", "EngineOutput", "EngineStats", "Logprob", "Timings"),
    "paged.sampling.adjustments": ("CannotAdjust", "GrammarFailed", "ProcessorFailed"),
    "paged.sampling.search_params": ("BeamSearchParams", "ContrastiveSearchParams"),
    "paged.sampling.errors": ("InvalidSampling",),
    "paged.sampling.params": ("SamplingParams",),
    "paged.sampling.structured": ("StructuredOutputsParams",),
    "paged.turns": ("EngineInUse",),
}

# These need the extra `engine`.
_ENGINE_NAMES = {
    "paged.async_engine": ("AsyncEngine", "DeadlineExceeded", "EngineClosed"),
    "paged.engine": ("Engine",),
    "paged.llm": ("LLM",),
    "paged.model.loading": ("LoadedModel", "load_model"),
    "paged.steps": ("EngineFailed",),
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
        raise AttributeError(f"module 'paged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
