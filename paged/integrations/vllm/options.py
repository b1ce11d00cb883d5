"""Options of the plug-in: `additional_config={"paged": {...}}` of vLLM, or the same as JSON in the environment's PAGED_VLLM.

Knows their names and values. Does not know vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from paged.integrations.vllm.errors import RefusedByPaged
from paged.scheduler import POLICIES

VARIABLE = "PAGED_VLLM"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What vLLM has no setting for.

    policy          a name in paged.POLICIES
    prefix_caching  equal prefixes share their blocks, whatever vLLM's enable_prefix_caching says: that one hashes every prompt, which is
                    not needed here, so switch it off (--no-enable-prefix-caching)
    """

    policy: str = "paged"
    prefix_caching: bool = True


def options_of(additional_config: Any) -> Options:
    """The options that were given; of two places `additional_config` counts. Raises RefusedByPaged."""
    if isinstance(additional_config, Mapping) and "paged" in additional_config:
        return _checked(additional_config["paged"], 'additional_config["paged"]')
    text = os.environ.get(VARIABLE)
    if not text:
        return Options()
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise RefusedByPaged(
            f'{VARIABLE} has to be a JSON object such as {{"policy": "paged"}}; got {text!r}: {error}.'
        ) from None
    return _checked(value, VARIABLE)


def _checked(value: Any, where: str) -> Options:
    try:
        options = msgspec.convert(value, Options)
    except msgspec.ValidationError as error:
        known = ", ".join(Options.__struct_fields__)
        raise RefusedByPaged(f"{where}: {error}; options are {known}.") from None
    if options.policy not in POLICIES:
        raise RefusedByPaged(f"{where}: there is no policy {options.policy!r}; policies are {', '.join(POLICIES)}.")
    return options
