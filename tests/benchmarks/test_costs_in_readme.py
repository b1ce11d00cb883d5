"""README's table of costs is the run that is committed."""

import json


def test_the_table_is_made_from_the_committed_run(monkeypatch, repository):
    monkeypatch.syspath_prepend(repository / "benchmarks")
    import host_cost_table as table

    measured = json.loads((repository / "benchmarks" / "results" / "host-cost.json").read_text())
    readme = (repository / "README.md").read_text()
    assert table.with_rows(readme, table.readme_rows(measured)) == readme
    assert table.page(measured) == (repository / "benchmarks" / "results" / "host-cost.md").read_text()
