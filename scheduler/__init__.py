"""Decisions for a paged KV cache: who runs, who waits, who gives blocks up.

Needs numpy, msgspec and block_manager. Knows no tensors and no clock.
"""

from scheduler.accounting import SchedulerStats
from scheduler.batch import Batch, Output, Outputs, RequestUsage, SteadyBatch
from scheduler.core import Scheduler
from scheduler.drafts import Drafts
from scheduler.errors import (
    BatchEnded,
    BatchError,
    BatchOutOfOrder,
    DuplicateRequest,
    ForeignBatch,
    InvalidRequest,
    NeverFits,
    RequestInFlight,
    TooManyOutstanding,
    UnknownPolicy,
    UnknownRequest,
    WaitingFull,
    WrongDrafts,
    WrongTokens,
)
from scheduler.explain import Explanation
from scheduler.policies import POLICIES, Costs, Policy
from scheduler.request import Request, Retention
from scheduler.state import Limits
from scheduler.status import FINISH_REASONS, Status

__all__ = [
    "FINISH_REASONS",
    "POLICIES",
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
    "Output",
    "Outputs",
    "Policy",
    "Request",
    "RequestInFlight",
    "RequestUsage",
    "Retention",
    "Scheduler",
    "SchedulerStats",
    "Status",
    "SteadyBatch",
    "TooManyOutstanding",
    "UnknownPolicy",
    "UnknownRequest",
    "WaitingFull",
    "WrongDrafts",
    "WrongTokens",
]
