"""Decisions for a paged KV cache: who runs, who waits, who gives blocks up.

Needs numpy, msgspec and block_manager. Knows no tensors and no clock.
"""

from paged.scheduler.accounting import SchedulerStats
from paged.scheduler.batch import Batch, Output, Outputs, RequestUsage
from paged.scheduler.core import Scheduler
from paged.scheduler.drafts import UNKNOWN_DRAFT, Drafts
from paged.scheduler.errors import (
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
from paged.scheduler.explain import Explanation
from paged.scheduler.forecast import Forecast
from paged.scheduler.listing import RequestView
from paged.scheduler.policies import POLICIES, Costs, Policy
from paged.scheduler.request import Request, Retention
from paged.scheduler.state import Limits
from paged.scheduler.status import FINISH_REASONS, Status

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
]
