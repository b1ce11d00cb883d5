"""A paged KV-cache memory manager and scheduler for LLM inference.

`import paged` is the door: every public name of the memory layer can be had from here. It loads nothing until a name is
used, so that reading `paged.__version__` costs neither numpy nor, one day, torch.

    BlockManager and Scheduler      the memory layer a serving engine embeds
    Request, Batch, Output          what goes in, what one step runs, what comes out
    PagedError                      the root of every typed error here
"""

from typing import TYPE_CHECKING

from paged.siblings import ShadowedPackage, check_siblings, import_sibling

if TYPE_CHECKING:
    from block_manager import (
        Admission,
        BlockManager,
        DuplicateRow,
        Hit,
        InvalidConfig,
        InvalidNamespace,
        InvalidTokens,
        MemoryStats,
        Moves,
        OutOfBlocks,
        PagedError,
        RowInFlight,
        RowNotInFlight,
        RowSwapped,
        UnknownRow,
    )
    from scheduler import (
        POLICIES,
        Batch,
        BatchEnded,
        BatchError,
        BatchOutOfOrder,
        Costs,
        DuplicateRequest,
        Explanation,
        ForeignBatch,
        InvalidRequest,
        NeverFits,
        Output,
        Outputs,
        Policy,
        Request,
        RequestInFlight,
        RequestUsage,
        Scheduler,
        SchedulerStats,
        Status,
        UnknownPolicy,
        UnknownRequest,
        WaitingFull,
        WrongTokens,
    )

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "Admission",
    "Batch",
    "BatchEnded",
    "BatchError",
    "BatchOutOfOrder",
    "BlockManager",
    "Costs",
    "DuplicateRequest",
    "DuplicateRow",
    "Explanation",
    "ForeignBatch",
    "Hit",
    "InvalidConfig",
    "InvalidNamespace",
    "InvalidRequest",
    "InvalidTokens",
    "MemoryStats",
    "Moves",
    "NeverFits",
    "OutOfBlocks",
    "Output",
    "Outputs",
    "PagedError",
    "Policy",
    "Request",
    "RequestInFlight",
    "RequestUsage",
    "RowInFlight",
    "RowNotInFlight",
    "RowSwapped",
    "Scheduler",
    "SchedulerStats",
    "ShadowedPackage",
    "Status",
    "UnknownPolicy",
    "UnknownRequest",
    "UnknownRow",
    "WaitingFull",
    "WrongTokens",
    "check_siblings",
]

_PUBLIC_NAMES = {
    "block_manager": (
        "Admission",
        "BlockManager",
        "DuplicateRow",
        "Hit",
        "InvalidConfig",
        "InvalidNamespace",
        "InvalidTokens",
        "MemoryStats",
        "Moves",
        "OutOfBlocks",
        "PagedError",
        "RowInFlight",
        "RowNotInFlight",
        "RowSwapped",
        "UnknownRow",
    ),
    "scheduler": (
        "POLICIES",
        "Batch",
        "BatchEnded",
        "BatchError",
        "BatchOutOfOrder",
        "Costs",
        "DuplicateRequest",
        "Explanation",
        "ForeignBatch",
        "InvalidRequest",
        "NeverFits",
        "Output",
        "Outputs",
        "Policy",
        "Request",
        "RequestInFlight",
        "RequestUsage",
        "Scheduler",
        "SchedulerStats",
        "Status",
        "UnknownPolicy",
        "UnknownRequest",
        "WaitingFull",
        "WrongTokens",
    ),
}


if not TYPE_CHECKING:
    # Hidden from type checkers, which would otherwise take every misspelt name for an attribute.
    def __getattr__(name: str) -> object:
        for sibling, public in _PUBLIC_NAMES.items():
            if name in public:
                value = getattr(import_sibling(sibling, public), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module 'paged' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
