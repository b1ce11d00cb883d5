"""Traces of real services: when each request arrived, how long its prompt and output were, and which prompts share a prefix.

Knows file formats and how prompts are made up again from what a trace says about them. Does not know memory, schedulers or time
passing: a trace is data.
"""

from paged.traces.errors import TraceError
from paged.traces.excerpts import EXCERPTS, Excerpt, excerpt_path
from paged.traces.formats import FORMATS, Format, read_trace
from paged.traces.trace import Trace

__all__ = ["EXCERPTS", "FORMATS", "Excerpt", "Format", "Trace", "TraceError", "excerpt_path", "read_trace"]
