"""The page about metrics names every metric, with its kind and labels, every one of vLLM's that is left out, and every attribute of a span."""

import json
import re
from dataclasses import replace

import msgspec
import pytest

from paged.block_manager import LayerGroup
from paged.serving.metrics import FINISHED, MISSED, Metrics
from paged.serving.request_log import MOST_LINES, RequestLog
from paged.serving.tracing import MOST_SPANS, attributes

from ..serving import samples  # noqa: TID252

PAGE = "docs/metrics.md"
RECORD = replace(samples.RECORD, status=500, finish_reason="error")


@pytest.fixture(scope="module")
def families():
    metrics = Metrics("model")
    metrics.ready(msgspec.structs.replace(samples.READY, groups=[LayerGroup("window", 8)]))
    metrics.refused(RECORD)
    return {family.name: family for family in metrics.registry.collect() if ":" in family.name}


def rows(page):
    """Of the tables of metrics, by name: the other cells."""
    found = re.findall(r"^\| `((?:vllm|paged):\w+)` \| (\w+) \|([^|]*)\|([^|]*)\|", page, flags=re.MULTILINE)
    assert len({name for name, *_ in found}) == len(found)
    return {name: cells for name, *cells in found}


def test_the_tables_have_the_metrics_of_a_server_with_kinds_and_labels(page, families):
    wanted = {}
    for name, family in families.items():
        labels = {label for sample in family.samples for label in sample.labels}
        wanted[name] = (family.type, labels - {"model_name", "engine", "le"})
    found = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, (kind, labels, _) in rows(page).items()}
    assert found == wanted


def test_every_value_of_a_label_is_named_where_its_metric_is(page, families):
    for name, (_, labels, meaning) in rows(page).items():
        for label in re.findall(r"`(\w+)`", labels):
            values = {sample.labels[label] for sample in families[name].samples}
            if label != "group" and name not in ("vllm:cache_config_info", "paged:requests_refused"):
                assert values <= set(re.findall(r"`(\w+)`", meaning)), name


def test_what_vllm_has_is_in_a_table_or_left_out_with_a_reason(page, repository):
    vllms = json.loads((repository / "tests" / "serving" / "vllm_metrics.json").read_text())
    assert vllms["version"].startswith(re.search(r"vLLM (\d+\.\d+)", page)[1])
    left_out = page.partition("### What vLLM has and we leave out")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| (.*) \| ", left_out, flags=re.MULTILINE))
    absent = {name for cell in named for name in re.findall(r"`(vllm:\w+)`", cell)}
    assert absent | {name for name in rows(page) if name.startswith("vllm:")} == set(vllms["metrics"])
    assert absent.isdisjoint(rows(page))


def test_the_line_of_the_log_is_one_and_its_fields_are_named(page, tmp_path):
    sample = json.loads(re.search(r"```json\n(.*)\n```", page)[1])
    with (tmp_path / "log").open("wb") as file:
        log = RequestLog(file)
        log.write(RECORD)
        log.close(timeout_s=600)
    assert list(sample) == list(json.loads((tmp_path / "log").read_text()))
    assert [reason for reason in (*FINISHED, *MISSED) if f"`{reason}`" not in page] == []


def test_every_attribute_of_a_span_is_named_and_limits_are_those_of_the_program(page):
    table = page.partition("## Traces")[2]
    named = {name for name in re.findall(r"`([\w.]+)`", table) if "." in name}
    assert named == set(attributes(RECORD, "model"))
    assert f"{MOST_LINES:,}" in page and f"{MOST_SPANS:,}" in page
