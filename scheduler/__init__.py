"""Decisions for a paged KV cache: who runs, who waits, who gives blocks up.

Needs numpy, msgspec and block_manager. Knows no tensors and no clock.
"""

from .accounting import SchedulerStats
from .batch import Batch, Output, Outputs, RequestUsage
from .core import Scheduler
from .drafts import UNKNOWN_DRAFT, Drafts
from .errors import (
    BatchEnded,
    BatchError,
    BatchOutOfOrder,
    DuplicateRequest,
    ForeignBatch,
    InvalidRequest,
    NeverFits,
    RequestInFlight,
    SchedulerInUse,
    TooManyOutstanding,
    UnknownPolicy,
    UnknownRequest,
    WaitingFull,
    WrongDrafts,
    WrongTokens,
)
from .explain import Explanation
from .listing import RequestView
from .outlook import Outlook
from .policies import POLICIES, Costs, Policy
from .request import Request, Retention
from .state import Limits
from .status import FINISH_REASONS, Status

__all__ = [
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
    "ForeignBatch",
    "InvalidRequest",
    "Limits",
    "NeverFits",
    "Outlook",
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
]
