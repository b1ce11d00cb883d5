"""Options of the plug-in: vLLM's `additional_config={"paged": {...}}`, or the same as JSON in the environment variable PAGED_VLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from paged.errors import RefusedByPaged
from paged.scheduler import POLICIES, Costs

VARIABLE = "PAGED_VLLM"
HOST_TIER = "paged.integrations.vllm.host_tier"
"""The module path of our connector, for vLLM's options."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for which vLLM has no setting.

    policy          a name in paged.POLICIES
    prefix_caching  equal prefixes share their blocks, whatever vLLM's enable_prefix_caching says. Switch that off (--no-enable-prefix-caching): it
                    hashes every prompt, which is not needed here
    costs           of swapping and recomputing, with host blocks
    """

    policy: str = "paged"
    prefix_caching: bool = True
    costs: Costs = Costs()


def options_of(additional_config: Any) -> Options:
    """Return the given options; `additional_config` counts before the environment. Raises RefusedByPaged."""
    if isinstance(additional_config, Mapping) and "paged" in additional_config:
        return _checked(additional_config["paged"], 'additional_config["paged"]')
    text = os.environ.get(VARIABLE)
    if not text:
        return Options()
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RefusedByPaged(
            f'{VARIABLE} has to be a JSON object such as {{"policy": "paged"}}; got {text!r}: {error}.'
        ) from None
    return _checked(value, VARIABLE)


def is_host_tier(connector: Any) -> bool:
    """Whether vLLM's KVTransferConfig names our connector."""
    return getattr(connector, "kv_connector_module_path", None) == HOST_TIER


def host_blocks_of(connector: Any) -> int:
    """Return the host blocks that vLLM's KVTransferConfig gives to our connector; 0 without it. Raises RefusedByPaged."""
    if not is_host_tier(connector):
        return 0
    number = connector.kv_connector_extra_config.get("host_blocks")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise RefusedByPaged(
            f'kv_connector_extra_config of {connector.kv_connector} has to be {{"host_blocks": N}} with N of at least 1; got {number!r}.'
        )
    return number


def _checked(value: Any, where: str) -> Options:
    try:
        options = msgspec.convert(value, Options)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        known = ", ".join(Options.__struct_fields__)
        raise RefusedByPaged(f"{where}: {error}; options are {known}.") from None
    if options.policy not in POLICIES:
        raise RefusedByPaged(f"{where}: there is no policy {options.policy!r}; policies are {', '.join(POLICIES)}.")
    return options
