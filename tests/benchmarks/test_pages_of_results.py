"""Pages of results are made from the runs that are committed beside them."""

import json

import pytest

PAGES = {
    "cpu-engines": "cpu_engines",
    "fidelity": "fidelity",
    "host-cost": "host_cost_table",
    "model-cost": "model_cost",
    "quantised-beside-peers": "quantised_beside_peers",
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_from_the_committed_run(benchmark_script, repository, name):
    results, script = repository / "benchmarks" / "results", benchmark_script(PAGES[name])
    page = script.page_of if name == "quantised-beside-peers" else script.page
    assert page(json.loads((results / f"{name}.json").read_text())) == (results / f"{name}.md").read_text()
