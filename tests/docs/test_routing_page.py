"""docs/routing.md: its Python runs, its command's options exist, and it names every router."""

import re

from paged.engine.routing import RoutingRules
from paged.study.simulator import ROUTERS

PAGE = "docs/routing.md"


def test_the_python_of_the_page_runs(page, fences):
    [program] = fences(page, "python")
    exec(compile(program, "routing.md", "exec"), {})


def test_every_option_of_the_page_is_one_of_the_command(page, options_of):
    options = set(re.findall(r"--[a-z][a-z-]+", page))
    assert len(options) > 4 and options <= options_of("simulate")


def test_every_router_and_the_rules_that_bound_a_choice_are_on_the_page(page):
    assert all(f"`{name}`" in page for name in ROUTERS)
    assert all(
        f"`{name}`" in page and name in RoutingRules.__struct_fields__ for name in ("bound_s", "bound_times", "spared")
    )
