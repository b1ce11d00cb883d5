"""Serving systems by version, as a simulation needs them: policy, limits, and what they add to a step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from paged import POLICIES, Policy
from paged.base.fields import AtLeast1
from paged.errors import InvalidConfig, UnknownEngine
from paged.study.files import read_described
from paged.study.hardware.measured_step import Launching
from paged.study.limits import check

_FOLDER = Path(__file__).parent / "engines"


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults of a run of this engine.

    policy, watermark    its policy here, and the share of blocks that it keeps free when it admits
    memory_share         of the device's memory that it takes
    reserved_blocks      blocks of its count that hold no tokens (vLLM's null block)
    reserved_rows        sequences of its setup that it does not serve
    runs_ahead           it decides a step while the one before runs
    launching            what it adds to the kernels of a step
    source               of the figures, and what some were fitted to
    """

    name: str
    policy: str
    watermark: float = 0.0
    max_tokens_per_step: AtLeast1
    max_sequences: AtLeast1
    block_size: AtLeast1 = 16
    prefix_caching: bool = True
    memory_share: float = 0.9
    reserved_blocks: int = 0
    reserved_rows: int = 0
    runs_ahead: bool = False
    launching: Launching = Launching()
    source: str = ""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidConfig(f"policy is {self.policy}; known are {', '.join(POLICIES)}")
        check(self)

    def own_policy(self) -> Policy:
        """Return the policy with this engine's watermark."""
        return msgspec.structs.replace(POLICIES[self.policy], watermark=self.watermark)


def engine_names() -> list[str]:
    """Return the names of the described engines, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def engine_named(name: str) -> EngineDescription:
    """Return the engine of that name, or the one in a file if the name ends in .json.

    Raises UnknownEngine, BadHardwareFile for a file that does not describe an engine, and OSError for a file that cannot be read.
    """
    if name.endswith(".json"):
        return read_described(Path(name), EngineDescription)
    if name not in engine_names():
        raise UnknownEngine(name, engine_names())
    return read_described(_FOLDER / f"{name}.json", EngineDescription)
