"""Write down the metrics of the vLLM that is installed: names, kinds, labels and buckets.

    PYTHONPATH=. .venv-vllm/bin/python -m conformance.vllm.record_metrics > tests/serving/vllm_metrics.json

vLLM's own loggers are made, with stand-ins for prometheus_client's classes, which note how they are made. The suite holds ours against the
file where there is no vLLM; a test with vLLM compares the two. Knows how loggers are set up.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

MOST_TOKENS = 10**6
"""A model's length, where the buckets of tokens end."""


def recorded() -> dict[str, Any]:
    """Version, and by name what each metric is."""
    import vllm
    from vllm.config.cache import CacheConfig
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    found: dict[str, dict[str, Any]] = {}

    def noted(kind: str) -> type:
        class Noted:
            def __init__(
                self, name: str, documentation: str, labelnames: Any = (), buckets: Any = None, **_: Any
            ) -> None:
                found[name] = {"kind": kind, "labels": list(labelnames)}
                if buckets is not None:
                    found[name]["buckets"] = [float(bound) for bound in buckets]

            def labels(self, *_: Any, **__: Any) -> Any:
                return self

            def set(self, _: float) -> None: ...

        return Noted

    class Drafts(SpecDecodingProm):
        _counter_cls = noted("counter")

    class Logger(PrometheusStatLogger):
        _gauge_cls, _counter_cls, _histogram_cls = noted("gauge"), noted("counter"), noted("histogram")
        _spec_decoding_cls = Drafts
        _kv_connector_cls = _ec_connector_cls = _perf_metrics_cls = staticmethod(lambda *_: None)

    config = SimpleNamespace(
        observability_config=SimpleNamespace(
            show_hidden_metrics=False, kv_cache_metrics=True, custom_histogram_buckets=None
        ),
        model_config=SimpleNamespace(served_model_name="model", max_model_len=MOST_TOKENS, is_diffusion=False),
        speculative_config=SimpleNamespace(num_speculative_tokens=1),
        cache_config=CacheConfig(block_size=16),
        kv_transfer_config=None,
        watermark_config=None,
        lora_config=None,
    )
    Logger(config).log_engine_initialized()
    return {"version": vllm.__version__, "metrics": dict(sorted(found.items()))}


if __name__ == "__main__":
    json.dump(recorded(), sys.stdout, indent=1)
    print()
