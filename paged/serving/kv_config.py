"""The configuration of KV events, by vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from paged.errors import InvalidConfig


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of KV events, by the names of vLLM's `--kv-events-config`.

    publisher       "zmq", or "null" for none; by default as enable_kv_cache_events says
    endpoint        of new batches; bound if it has `*` or `::` or is ipc, else connected to
    replay_endpoint where readers request batches again; None: nowhere
    buffer_steps    batches kept for replays
    hwm             messages that wait for a slow reader before it loses some; 0: no limit
    max_queue_size  steps that may wait for the publisher's thread
    use_int_block_hashes
                    True: hashes are integers of 64 bits; False: all 32 bytes. vLLM reads this from an environment variable
    restart_points  also send where prompts can begin in a model whose layers are of several kinds: our own events, which readers made for
                    vLLM may refuse
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 10_000
    hwm: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 100_000
    max_queue_size: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    topic: str = ""
    use_int_block_hashes: bool = True
    restart_points: bool = False

    @classmethod
    def of(cls, given: Any) -> KvEventsConfig:
        """Return the configuration of a JSON object, as text or as an object. Raises InvalidConfig."""
        try:
            if isinstance(given, str):
                given = msgspec.json.decode(given)
            return msgspec.convert(given, cls)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
            known = ", ".join(cls.__struct_fields__)
            raise InvalidConfig(
                f"KV events are described by a JSON object with any of {known}; got {given!r}: {error}."
            ) from None
