"""Pages of results are made from the runs beside them, and a measurement names its processor as all others do."""

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


@pytest.mark.parametrize("folder", ["benchmarks", "conformance"])
def test_only_paged_reads_the_name_of_the_processor(folder, repository):
    sources = {path.name: path.read_text(encoding="utf-8") for path in (repository / folder).rglob("*.py")}
    assert sources
    assert [name for name, source in sources.items() if "cpuinfo" in source or "platform.processor" in source] == []
