"""The page of host costs is the run that is committed."""

import json


def test_the_page_is_made_from_the_committed_run(benchmark_script, repository):
    results = repository / "benchmarks" / "results"
    measured = json.loads((results / "host-cost.json").read_text())
    assert benchmark_script("host_cost_table").page(measured) == (results / "host-cost.md").read_text()
