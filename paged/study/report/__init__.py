"""Results of simulations for people and for programs: one HTML file with plots, CSV, Chrome traces. Plots need the extra `study`."""

from paged.base.whole_file import writable
from paged.study.report.page import write_html
from paged.study.report.plan_page import PlanPage, write_plan_csv, write_plan_html
from paged.study.report.table import flat, write_csv
from paged.study.report.trace_events import TraceEvents, write_trace_events
from paged.study.report.validation_page import validation_rows, write_sessions_html, write_validation_html

__all__ = [
    "PlanPage",
    "TraceEvents",
    "flat",
    "validation_rows",
    "writable",
    "write_csv",
    "write_html",
    "write_plan_csv",
    "write_plan_html",
    "write_sessions_html",
    "write_trace_events",
    "write_validation_html",
]
