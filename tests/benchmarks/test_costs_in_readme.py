"""README's table of costs is the run that is committed."""

import importlib.util
import json
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_table_is_made_from_the_committed_run(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    spec = importlib.util.spec_from_file_location("host_cost_table", REPOSITORY / "benchmarks" / "host_cost_table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    measured = json.loads((REPOSITORY / "benchmarks" / "results" / "host-cost.json").read_text())
    readme = (REPOSITORY / "README.md").read_text()
    assert table.with_rows(readme, table.readme_rows(measured)) == readme
    assert table.page(measured) == (REPOSITORY / "benchmarks" / "results" / "host-cost.md").read_text()
