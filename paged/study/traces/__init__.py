"""Traces of services, real and made up: when each request arrived, how long its prompt and output were, and which prompts share content."""

from paged.study.traces.applied import Applied
from paged.study.traces.arrivals import PROCESSES
from paged.study.traces.formats import FORMATS, Format, read_trace
from paged.study.traces.lengths import PRESETS, Fixed, LengthPreset, LogNormal
from paged.study.traces.opening import EXCERPTS, Excerpt, excerpt_path, is_synthetic, open_trace
from paged.study.traces.schema import save_trace
from paged.study.traces.superposing import superposed
from paged.study.traces.synthetic import synthetic
from paged.study.traces.trace import DECLARED_CAP, NOT_DECLARED, Trace

__all__ = [
    "DECLARED_CAP",
    "EXCERPTS",
    "FORMATS",
    "NOT_DECLARED",
    "PRESETS",
    "PROCESSES",
    "Applied",
    "Excerpt",
    "Fixed",
    "Format",
    "LengthPreset",
    "LogNormal",
    "Trace",
    "excerpt_path",
    "is_synthetic",
    "open_trace",
    "read_trace",
    "save_trace",
    "superposed",
    "synthetic",
]
