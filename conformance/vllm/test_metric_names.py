"""The metrics that the suite holds ours against are those of the vLLM that is installed."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from conformance.vllm.record_metrics import recorded

RECORDED = Path(__file__).parents[2] / "tests" / "serving" / "vllm_metrics.json"


def test_the_recorded_metrics_are_vllms():
    assert json.loads(RECORDED.read_text()) == recorded()
