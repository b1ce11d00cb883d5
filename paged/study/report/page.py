"""The report: one HTML file that loads nothing from elsewhere. It contains the script of plotly, which also checks the plots."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from paged.base.extras import import_with_extra
from paged.errors import InvalidConfig
from paged.study.report.comparisons import cost, distributions, preemptions, under_load
from paged.study.report.drawing import Figure
from paged.study.report.facts import facts, sentence
from paged.study.report.frame import as_json, inert, paragraphs, plot_place, row, scrolled, table, write_page
from paged.study.report.naming import Look, Named, named, ours_last
from paged.study.report.over_time import NUM_LINE_POINTS, NUM_POINTS, NUM_STEPS, memory, occupancy, queues, roofline
from paged.study.report.table import lines
from paged.study.simulator import Outcome, grouped

_DASHES = {"solid": "", "dash": "6 3", "dot": "2 2"}


def _averaged(num_points: int) -> str:
    return f"A longer timeline is shown as {num_points:,} averages over equal times, weighted by time; shorter peaks are flattened."


_SECTIONS = (
    (
        "load",
        "Throughput against latency",
        "How many tokens a second each policy writes, and how long its slowest requests wait. Lower right is better. A line joins the loads of one policy, lightest first; whiskers are the smallest and largest of several seeds.",
    ),
    (
        "memory",
        "KV memory over time",
        "What the pool's slots hold as time goes by, of one policy. Tokens: slots whose K and V are computed. Fragmentation: held, not filled. Promised: kept by the policy for sequences beyond what they hold. "
        f"Cached: content that no request holds, for prefix hits; evicted when needed. {_averaged(NUM_POINTS)}",
    ),
    (
        "occupancy",
        "Occupancy over time",
        f"What share of memory, rows and token budget each policy uses as time goes by. {_averaged(NUM_LINE_POINTS)}",
    ),
    (
        "queues",
        "Queues over time",
        f"How many requests run, wait and stand aside, of those that have arrived and have not ended. {_averaged(NUM_LINE_POINTS)}",
    ),
    (
        "preemptions",
        "Preemptions and waste",
        "What each policy takes back for want of memory, and what that costs. First: how often a running request gave blocks back; solid by recompute, hatched by swap. Second: tokens computed again (solid), "
        "swapped out (hatched) and swapped in (crossed), and their share of all computed tokens.",
    ),
    (
        "distributions",
        "Distributions",
        "How many seconds requests took: the share that had at most so many. Requests that were rejected, or have no second token, are not in them.",
    ),
    (
        "roofline",
        "Roofline",
        f"How much of the device steps reach: at most {NUM_STEPS} of each policy, evenly picked. Operations and bytes are what a step's time was made of; "
        "that time has the host's share in it. Left of the corner the device waits for memory, right of it for arithmetic.",
    ),
    (
        "cost",
        "Cost",
        "What a million output tokens cost: the price of the whole makespan, idle time included, for each million output tokens.",
    ),
)
"""Id, heading and explanation of each plot, in the order of the page."""


def write_html(path: str | Path, outcomes: Sequence[Outcome]) -> None:
    """Write a self-contained page about these outcomes: summary, plots, and the simulated scenarios.

    Raises MissingExtra without plotly, InvalidConfig without outcomes, and UnwritablePath.
    """
    import_with_extra("plotly.offline", "study.report.write_html")
    if not outcomes:
        raise InvalidConfig("a report needs at least one outcome; there is none")
    settings = grouped(named(outcomes), lambda one: one.setting)
    # The one with the fullest memory, in which policies differ.
    first = max(settings, key=lambda setting: fmean(one.outcome.result.memory.of_pool for one in settings[setting]))
    every = [one for group in settings.values() for one in group]
    told = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(outcomes))
    tables = "".join(_table(group, is_hidden=setting != first) for setting, group in settings.items())
    body = [
        paragraphs([sentence(outcomes)]),
        f"<dl>{told}</dl>",
        "<noscript><p>The plots need JavaScript; the table does not.</p></noscript>",
        _controls(settings, first, every),
        f'<section id="summary"><h2>Summary</h2>{scrolled(tables)}</section>',
        *(_section(*section) for section in _SECTIONS),
    ]
    title = f"Simulation of {', '.join(dict.fromkeys(o.result.trace for o in outcomes))}"
    write_page(path, title, body, _figures(settings, every), "page.js")


def _controls(settings: dict[str, list[Named]], first: str, every: Sequence[Named]) -> str:
    options = "".join(
        f"<option{' selected' if setting == first else ''}>{escape(setting or 'all')}</option>" for setting in settings
    )
    choice = f'<label{"" if len(settings) > 1 else " hidden"}>Setting <select id="setting">{options}</select></label>'
    looks = {one.policy: one.look for one in every}
    buttons = (
        f'<button type="button" aria-pressed="true" data-policy="{escape(policy)}">{_key(look)}{escape(policy)}</button>'
        for policy, look in looks.items()
    )
    return f'<div id="controls">{choice}{"".join(buttons)}</div>'


def _key(look: Look) -> str:
    """Draw a piece of a policy's line."""
    return (
        f'<svg width="24" height="8" aria-hidden="true"><line x1="0" y1="4" x2="24" y2="4" stroke="{look.colour}" '
        f'stroke-width="3" stroke-dasharray="{_DASHES[look.dash]}"/></svg>'
    )


def _table(outcomes: Sequence[Named], *, is_hidden: bool) -> str:
    rows = []
    for heading, group in lines(outcomes):
        rows.append(f'<tr><th class="heading" colspan="{len(outcomes) + 1}">{heading}</th></tr>')
        for line in group:
            unit = f" <small>({line.unit})</small>" if line.unit else ""
            rows.append(row(f"{line.name}{unit}", line.cells(outcomes)))
    # Columns are equally wide, and no wider than a figure needs (page.css).
    opening = f'<table class="policies" style="--columns: {len(outcomes)}"{" hidden" if is_hidden else ""}>'
    return table(["", *(one.label for one in outcomes)], rows, opening)


def _section(id: str, heading: str, text: str) -> str:
    choice = '<label>Policy <select id="outcome"></select></label>' if id == "memory" else ""
    return f'<section id="{id}"><h2>{heading}</h2><p>{text}</p>{choice}{plot_place(f"{heading}: {text}")}</section>'


def _figures(settings: dict[str, list[Named]], every: Sequence[Named]) -> Iterator[str]:
    """Yield all plots as JSON, setting by setting."""
    under: dict[str, str] = {}
    for one in every:
        if one.line not in under:
            under[one.line] = as_json(under_load(ours_last([other for other in every if other.line == one.line])))
    for group in settings.values():
        plots: dict[str, Figure | None] = {
            "occupancy": occupancy(ours_last(group)),
            "queues": queues(ours_last(group)),
            "preemptions": preemptions(group),
            "distributions": distributions(ours_last(group)),
            "roofline": roofline(ours_last(group)),
            "cost": cost(group),
        }
        drawn = [f'"load":{under[group[0].line]}', *(f'"{id}":{as_json(plot)}' for id, plot in plots.items())]
        memories = ",".join(as_json(memory(one)) for one in group)
        labels = inert(json.dumps([one.label for one in group]))
        yield f'{{"labels":{labels},"memory":[{memories}],"plots":{{{",".join(drawn)}}}}}'
