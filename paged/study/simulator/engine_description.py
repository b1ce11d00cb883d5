"""A serving system and version, as far as a simulation of it has to know it: its policy, its limits, and what it adds to a step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from paged import POLICIES, Policy
from paged.errors import InvalidConfig, UnknownEngine
from paged.study.hardware.files import read_described
from paged.study.hardware.measured_step import Launching

_FOLDER = Path(__file__).parent / "engines"


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run of this engine has unless it says otherwise.

    policy, watermark    its policy here, and the share of blocks that it keeps free when it admits
    max_tokens_per_step, max_sequences, block_size, prefix_caching
                         its defaults
    memory_share         of the device's memory that it takes
    reserved_blocks      of the blocks that it counts, those that hold no tokens (vLLM's null block)
    reserved_rows        of the sequences that it is set up for, those that it does not serve
    runs_ahead           it decides on a step while the one before runs
    launching            what it adds to the kernels of a step
    source               where the figures come from, and which were fitted on what
    """

    name: str
    policy: str
    watermark: float = 0.0
    max_tokens_per_step: int
    max_sequences: int
    block_size: int = 16
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
        for name in ("max_tokens_per_step", "max_sequences", "block_size"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it has to be at least 1")

    def own_policy(self) -> Policy:
        """The policy with its watermark."""
        return msgspec.structs.replace(POLICIES[self.policy], watermark=self.watermark)


def engine_names() -> list[str]:
    """The engines that are described, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def engine_named(name: str) -> EngineDescription:
    """The engine of that name, or the one in a file when the name ends in .json.

    Raises UnknownEngine, BadHardwareFile for a file that does not describe one, and OSError for one that cannot be read.
    """
    if name.endswith(".json"):
        return read_described(Path(name), EngineDescription)
    if name not in engine_names():
        raise UnknownEngine(name, engine_names())
    return read_described(_FOLDER / f"{name}.json", EngineDescription)
