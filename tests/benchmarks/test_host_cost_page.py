"""The page of host costs is the run that is committed."""

import json


def test_the_page_is_made_from_the_committed_run(monkeypatch, repository):
    monkeypatch.syspath_prepend(repository / "benchmarks")
    import host_cost_table as table

    results = repository / "benchmarks" / "results"
    measured = json.loads((results / "host-cost.json").read_text())
    assert table.page(measured) == (results / "host-cost.md").read_text()
