"""Traces of services, real and made up: arrivals, lengths of prompts and outputs, and the content that prompts share."""

from paged.study.traces.formats import FORMATS, read_trace, save_trace
from paged.study.traces.lengths import PRESETS, Fixed, LogNormal
from paged.study.traces.opening import EXCERPTS, Excerpt, is_synthetic, open_trace
from paged.study.traces.sessions import SESSIONS_EXCERPT, Begun, Session, draw_sessions, open_sessions, read_sessions
from paged.study.traces.superposing import superposed
from paged.study.traces.synthetic import PROCESSES, synthetic
from paged.study.traces.trace import NOT_DECLARED, Trace

__all__ = [
    "EXCERPTS",
    "FORMATS",
    "NOT_DECLARED",
    "PRESETS",
    "PROCESSES",
    "SESSIONS_EXCERPT",
    "Begun",
    "Excerpt",
    "Fixed",
    "LogNormal",
    "Session",
    "Trace",
    "draw_sessions",
    "is_synthetic",
    "open_sessions",
    "open_trace",
    "read_sessions",
    "read_trace",
    "save_trace",
    "superposed",
    "synthetic",
]
