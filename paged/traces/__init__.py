"""Traces of services, real and made up: when each request arrived, how long its prompt and output were, and which prompts share content."""

from paged.traces.applied import Applied
from paged.traces.arrivals import PROCESSES
from paged.traces.excerpts import EXCERPTS, Excerpt, excerpt_path
from paged.traces.formats import FORMATS, Format, read_trace
from paged.traces.lengths import PRESETS, Fixed, LengthPreset, LogNormal
from paged.traces.opening import is_synthetic, open_trace
from paged.traces.schema import save_trace
from paged.traces.superposing import superposed
from paged.traces.synthetic import synthetic
from paged.traces.trace import DECLARED_CAP, NOT_DECLARED, Trace

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
