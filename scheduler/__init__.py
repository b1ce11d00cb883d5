"""Decisions for a paged KV cache: which requests run, wait and give blocks up. Needs numpy, msgspec, block_manager."""

from .admission import Admission
from .batch import Batch, Output, Outputs, SchedulerStats
from .composition import Composition
from .core import Scheduler
from .drafts import UNKNOWN_DRAFT, Drafts
from .hints import Hint, HintOutcome
from .policies import POLICIES, Costs, Policy, register_policy
from .preemption import Victims
from .request import FINISH_REASONS, Request, RequestUsage, Retention, Status
from .reservations import Reservation
from .sessions import SessionView
from .state import Limits
from .strategies import Order, Strategies
from .views import Explanation, Outlook, PrefixExplanation, RequestView

__all__ = [
    "FINISH_REASONS", "POLICIES", "UNKNOWN_DRAFT", "Admission", "Batch", "Composition", "Costs", "Drafts",
    "Explanation", "Hint", "HintOutcome", "Limits", "Order", "Outlook", "Output", "Outputs", "Policy",
    "PrefixExplanation", "Request", "RequestUsage", "RequestView", "Reservation", "Retention", "Scheduler",
    "SchedulerStats", "SessionView", "Status", "Strategies", "Victims", "register_policy",
]  # fmt: skip
