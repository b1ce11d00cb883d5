"""A measurement names its processor as all others do."""

import pytest


@pytest.mark.parametrize("folder", ["benchmarks", "conformance"])
def test_only_paged_reads_the_name_of_the_processor(folder, repository):
    sources = {path.name: path.read_text(encoding="utf-8") for path in (repository / folder).rglob("*.py")}
    assert sources
    assert [name for name, source in sources.items() if "cpuinfo" in source or "platform.processor" in source] == []
