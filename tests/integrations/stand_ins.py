"""vLLM where there is none: modules with the names and fields that were recorded from it, so that our plug-in runs on them.

What a name is made of comes from `vllm_interface.json` (see conformance/vllm/record.py); what little behaviour the plug-in relies on is
written here. Where vLLM is installed nothing of this is used: the same tests run on vLLM's own classes.
"""

import dataclasses
import enum
import json
import logging
import sys
from abc import ABCMeta, abstractmethod
from collections import namedtuple
from dataclasses import make_dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec

RECORD = Path(__file__).with_name("vllm_interface.json")
# Defaults that something reads; all other fields begin as None.
_EMPTY = {"req_ids": list, "outputs": list, "scheduled_spec_decode_tokens": dict}
_EMPTY |= dict.fromkeys(("has_structured_output_requests", "pending_structured_output_tokens", "reset"), bool)
_EMPTY |= dict.fromkeys(("num_nans_in_logits", "requests", "queries", "hits"), int)
_EMPTY |= dict.fromkeys(("preempted_requests", "preempted_queries", "preempted_hits"), int)


def install(version: str = "") -> None:
    """Put the stand-ins where vLLM's modules would be: those of 0.32, or of a later version, of which a file has what differs."""
    record = json.loads(RECORD.read_text())
    if version:
        later = json.loads(RECORD.with_stem(f"{RECORD.stem}_{version}").read_text())
        record = {"version": later["version"], "names": record["names"] | later["names"]}
    for name, described in record["names"].items():
        module, _, attribute = name.partition(":")
        setattr(_module(module), attribute, _made(attribute, described))
    _add_behaviour()
    _module("vllm").__version__ = record["version"]


def _module(name: str) -> ModuleType:
    if name not in sys.modules:
        made = sys.modules[name] = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None, is_package=True)
        made.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(parent), last, made)
    return sys.modules[name]


def _made(name: str, described: dict[str, Any]) -> Any:
    kind, fields = described["kind"], described.get("fields", {})
    if kind == "enum":
        return enum.IntEnum(name, described["members"])
    if kind in ("dataclass", "struct"):
        make, field = (make_dataclass, dataclasses.field) if kind == "dataclass" else (msgspec.defstruct, msgspec.field)
        usual = {each: field(default_factory=_EMPTY.get(each, lambda: None)) for each in fields}
        made = [(each, Any, usual[each])[: 2 if fields[each] == "needed" else 3] for each in fields]
        # Of those that are derived, fields without a default may come behind others.
        are_mixed = [len(each) for each in made] != sorted(len(each) for each in made)
        others = dict.fromkeys(described.get("methods", ()))
        return make(name, made, namespace=others, **{"kw_only": True} if are_mixed else {})
    if kind == "tuple":
        return namedtuple(name, list(fields))
    if kind == "class":
        abstract = {each: abstractmethod(lambda *_: None) for each in described["abstract"]}
        return ABCMeta(name, (), dict.fromkeys(described["methods"]) | abstract)
    return lambda *_: None


def _add_behaviour() -> None:
    """Give the classes that little which the plug-in relies on."""
    import vllm.logger
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.metrics.stats import PrefixCacheStats
    from vllm.v1.request import RequestStatus
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    def make_empty() -> Any:
        # The runner's view of a step without requests.
        none = {name: [] for name in CachedRequestData.__dataclass_fields__}
        cached = CachedRequestData(**none | {"resumed_req_ids": set(), "all_token_ids": {}})
        return SchedulerOutput([], cached, {}, 0, {}, {}, set(), [])

    def record(self: Any, num_tokens: int, num_hits: int, preempted: bool, hits_by_source: Any = None) -> None:
        kind = "preempted_" if preempted else ""
        for name, count in (("requests", 1), ("queries", num_tokens), ("hits", num_hits)):
            setattr(self, kind + name, getattr(self, kind + name) + count)

    def find(asked: Any) -> Any:
        return getattr(import_module(asked.kv_connector_module_path), asked.kv_connector)

    vllm.logger.init_logger = logging.getLogger
    RequestStatus.is_finished = lambda self: self > RequestStatus.PREEMPTED
    SchedulerOutput.make_empty = staticmethod(make_empty)
    PrefixCacheStats.record = record
    SpecDecodingStats.new = lambda num: SimpleNamespace(observe_draft=lambda **_: None, num_spec_tokens=num)
    SpecDecodingStats.observe_draft = lambda self, **given: None
    KVConnectorBase_V1.__init__ = lambda self, *_: None
    KVConnectorFactory.get_connector_class = staticmethod(find)
    KVConnectorFactory.create_connector = staticmethod(
        lambda config, role, kv_cache_config: find(config.kv_transfer_config)(config, role, kv_cache_config)
    )


class StandInRequest:
    """The fields and methods of vllm.v1.request.Request that the plug-in reads and calls."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], sampling_params: Any, **given: Any) -> None:
        status = sys.modules["vllm.v1.request"].RequestStatus
        self.request_id, self.prompt_token_ids, self.sampling_params = request_id, prompt_token_ids, sampling_params
        self.num_prompt_tokens, self.max_tokens = len(prompt_token_ids), sampling_params.max_tokens
        self.output_token_ids, self.events = list[int](), list[Any]()
        self.num_computed_tokens = self.num_preemptions = 0
        self.status, self.stop_reason = status.WAITING, None
        self.prefill_stats: Any = StandInPrefill()
        defaults = {"client_index": 0, "priority": 0, "arrival_time": 0.0, "mm_features": [], "resumable": False}
        nothing = ("cache_salt", "lora_request", "prompt_embeds", "pooling_params", "trace_headers")
        defaults |= dict.fromkeys((*nothing, "structured_output_request")) | {"skip_reading_prefix_cache": False}
        vars(self).update(defaults | given)

    @property
    def use_structured_output(self) -> bool:
        return self.structured_output_request is not None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    def append_output_token_ids(self, tokens: int | list[int]) -> None:
        self.output_token_ids += [tokens] if isinstance(tokens, int) else tokens

    def record_event(self, kind: Any, timestamp: float | None = None) -> None:
        self.events.append((kind.name, timestamp))

    def take_events(self) -> list[Any] | None:
        events, self.events = self.events, []
        return events or None

    def take_prefill_stats(self) -> Any:
        stats, self.prefill_stats = self.prefill_stats, None
        return stats


class StandInPrefill:
    """What a request tells of its prompt with its first token."""

    def set(self, num_prompt_tokens: int, num_local_cached_tokens: int, num_external_cached_tokens: int) -> None:
        self.num_prompt_tokens, self.num_cached_tokens = num_prompt_tokens, num_local_cached_tokens
        self.num_external_cached_tokens = num_external_cached_tokens

    def finalize(self, num_cached_tokens: int) -> None: ...


def sampling(**given: Any) -> Any:
    defaults = {"max_tokens": 16, "min_tokens": 0, "stop_token_ids": []}
    defaults |= dict.fromkeys(("eos_token_id", "repetition_detection", "prompt_logprobs"))
    return SimpleNamespace(**defaults | given, num_logprobs=given.get("logprobs"))
