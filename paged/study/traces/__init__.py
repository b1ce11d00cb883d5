"""Traces of services, real and made up: arrivals, lengths of prompts and outputs, and the content that prompts share."""

from paged.study.traces.formats import read_trace, save_trace
from paged.study.traces.opening import EXCERPTS, is_synthetic, open_trace
from paged.study.traces.sessions import SESSIONS_EXCERPT, Begun, draw_sessions, open_sessions, read_sessions
from paged.study.traces.synthetic import PRESETS, PROCESSES, LogNormal, synthetic
from paged.study.traces.trace import NOT_DECLARED, Trace, superposed

__all__ = [
    "EXCERPTS",
    "NOT_DECLARED",
    "PRESETS",
    "PROCESSES",
    "SESSIONS_EXCERPT",
    "Begun",
    "LogNormal",
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
