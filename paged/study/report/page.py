"""The report: one HTML file that loads nothing from elsewhere.

Plotly, from the extra `study`, checks the plots and gives its script, which is written into the file.
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from paged.base.extras import import_with_extra
from paged.base.whole_file import whole_file
from paged.errors import InvalidConfig
from paged.study.report.comparisons import cost, distributions, preemptions, under_load
from paged.study.report.drawing import Figure
from paged.study.report.facts import facts, sentence
from paged.study.report.frame import as_json, framed, inert
from paged.study.report.naming import Look, Named, by_setting, named, ours_last
from paged.study.report.over_time import memory, occupancy, queues
from paged.study.report.roof import roofline
from paged.study.report.sections import SECTIONS
from paged.study.report.table import lines
from paged.study.simulator import Outcome

_DASHES = {"solid": "", "dash": "6 3", "dot": "2 2"}


def write_html(path: str | Path, outcomes: Sequence[Outcome]) -> None:
    """A self-contained page about these outcomes: summary, plots, what was simulated.

    Raises MissingExtra without plotly, InvalidConfig without outcomes, and OSError.
    """
    import_with_extra("plotly.offline", "study.report.write_html")
    if not outcomes:
        raise InvalidConfig("a report needs at least one outcome; there is none")
    settings = by_setting(named(outcomes))
    first = _most_pressed(settings)
    every = [one for group in settings.values() for one in group]
    body = [
        f"<p>{html.escape(sentence(outcomes))}</p>",
        _facts(outcomes),
        "<noscript><p>The plots need JavaScript; the table does not.</p></noscript>",
        _controls(settings, first, every),
        _summary(settings, first),
        *(_section(*section) for section in SECTIONS),
    ]
    title = f"Simulation of {', '.join(dict.fromkeys(o.result.trace for o in outcomes))}"
    text = framed(title, body, _figures(settings, every), "page.js")
    with whole_file(path) as file:
        file.write(text)


def _facts(outcomes: Sequence[Outcome]) -> str:
    pairs = (f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in facts(outcomes))
    return f"<dl>{''.join(pairs)}</dl>"


def _controls(settings: dict[str, list[Named]], first: str, every: Sequence[Named]) -> str:
    options = "".join(
        f"<option{' selected' if setting == first else ''}>{html.escape(setting or 'all')}</option>"
        for setting in settings
    )
    choice = f'<label{"" if len(settings) > 1 else " hidden"}>Setting <select id="setting">{options}</select></label>'
    looks = {one.policy: one.look for one in every}
    buttons = (
        f'<button type="button" aria-pressed="true" data-policy="{html.escape(policy)}">{_key(look)}{html.escape(policy)}</button>'
        for policy, look in looks.items()
    )
    return f'<div id="controls">{choice}{"".join(buttons)}</div>'


def _most_pressed(settings: dict[str, list[Named]]) -> str:
    """The setting that is shown first: where memory is fullest, policies differ."""
    return max(settings, key=lambda setting: fmean(one.outcome.result.memory.of_pool for one in settings[setting]))


def _key(look: Look) -> str:
    """A piece of a policy's line."""
    return (
        f'<svg width="24" height="8" aria-hidden="true"><line x1="0" y1="4" x2="24" y2="4" stroke="{look.colour}" '
        f'stroke-width="3" stroke-dasharray="{_DASHES[look.dash]}"/></svg>'
    )


def _summary(settings: dict[str, list[Named]], first: str) -> str:
    tables = "".join(_table(group, is_hidden=setting != first) for setting, group in settings.items())
    return f'<section id="summary"><h2>Summary</h2><div class="scroll" tabindex="0">{tables}</div></section>'


def _table(outcomes: Sequence[Named], *, is_hidden: bool) -> str:
    head = "".join(f'<th scope="col">{html.escape(one.label)}</th>' for one in outcomes)
    rows = []
    for heading, group in lines(outcomes):
        rows.append(f'<tr><th class="heading" colspan="{len(outcomes) + 1}">{heading}</th></tr>')
        for line in group:
            unit = f" <small>({line.unit})</small>" if line.unit else ""
            cells = "".join(
                f'<td class="best">{text}</td>' if best else f"<td>{text}</td>" for text, best in line.cells(outcomes)
            )
            rows.append(f'<tr><th scope="row">{line.name}{unit}</th>{cells}</tr>')
    # As many equally wide columns as there are, no wider than a figure needs (page.css).
    opening = f'<table class="policies" style="--columns: {len(outcomes)}"{" hidden" if is_hidden else ""}>'
    return f"{opening}<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _section(id: str, heading: str, text: str) -> str:
    choice = '<label>Policy <select id="outcome"></select></label>' if id == "memory" else ""
    return f'<section id="{id}"><h2>{heading}</h2><p>{text}</p>{choice}<div class="plot" role="img" aria-label="{html.escape(heading)}: {html.escape(text)}"></div></section>'


def _figures(settings: dict[str, list[Named]], every: Sequence[Named]) -> str:
    """All plots as JSON, a setting after the other."""
    under: dict[str, str] = {}
    for one in every:
        if one.line not in under:
            under[one.line] = as_json(under_load(ours_last([other for other in every if other.line == one.line])))
    documents = []
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
        documents.append(f'{{"labels":{labels},"memory":[{memories}],"plots":{{{",".join(drawn)}}}}}')
    return f"[{','.join(documents)}]"
