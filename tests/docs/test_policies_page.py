"""docs/policies.md says what POLICIES holds, each policy has its section, and its program runs."""

import re

from paged import POLICIES
from paged.scheduler import policies

PAGE = "docs/policies.md"


def test_the_table_is_what_the_policies_are(page):
    table = page.split("<!-- table: begin -->")[1].split("<!-- table: end -->")[0]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert shown == [
        [
            f"`{each.name}`",
            *(each.order, each.reservation, each.layout, each.foresight, each.composition),
            "yes" if each.chunked else "no",
            f"{each.watermark:g}",
            "–" if each.default_budget is None else f"{each.default_budget:,}",
        ]
        for each in POLICIES.values()
    ]


def test_each_named_policy_has_a_section_and_nobody_else_has(page):
    titles = re.findall(r"^## (.+)$", page, flags=re.MULTILINE)
    assert titles.pop() == "A policy of one's own"
    assert [name for title in titles for name in title.split(", ")] == list(POLICIES)


def test_the_program_of_the_page_runs(ran, monkeypatch):
    monkeypatch.setattr(policies, "POLICIES", dict(POLICIES))
    lines = ran("policies").splitlines()
    assert [line.split()[0] for line in lines] == ["mine"] * 200 + ["shortest"] * 200
    assert lines[-1] == "shortest a [7] length"
