"""Decisions for a paged KV cache: who runs, who waits, who gives blocks up.

Needs numpy, msgspec and block_manager. Knows no tensors and no clock.
"""

from .accounting import SchedulerStats
from .batch import Batch, Output, Outputs, RequestUsage
from .core import Scheduler
from .drafts import UNKNOWN_DRAFT, Drafts
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
    "Costs",
    "Drafts",
    "Explanation",
    "Limits",
    "Outlook",
    "Output",
    "Outputs",
    "Policy",
    "Request",
    "RequestUsage",
    "RequestView",
    "Retention",
    "Scheduler",
    "SchedulerStats",
    "Status",
]
