"""Options of the commands, and how a trace and a scheduler are made from them.

Knows names, limits and help texts. Does not know what a command does with them.
"""

import errno
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Argument, Option

from paged import POLICIES, BlockManager, Scheduler
from paged.simulator import StepTime
from paged.traces import EXCERPTS, Trace, excerpt_path, read_trace

_TRACE, _POOL, _STEP, _TIME = "The trace", "The pool", "A step", "What a step takes"

_TRACE_HELP = (
    "A file: Azure CSV, Mooncake JSON Lines, or our own schema in either (docs/traces.md); told apart by content. "
    f"Or the name of an excerpt that ships with paged: {', '.join(sorted(EXCERPTS))}."
)
_BLOCKS_HELP = "Device blocks. The default is about what an 80 GB device has left beside an 8B model."
_POLICY_HELP = f"Who decides: {', '.join(POLICIES)}. `paged policies` says what each does."
_CHECK_HELP = "Recompute every invariant before and after each update (slow); status 1 if one is violated."

# fmt: off
TraceArgument = Annotated[str, Argument(metavar="TRACE", help=_TRACE_HELP)]
Limit = Annotated[int | None, Option(min=1, help="Read only so many requests.", show_default="all", rich_help_panel=_TRACE)]
RateScale = Annotated[float, Option(help="Requests arrive so many times as fast.", rich_help_panel=_TRACE)]
LengthScale = Annotated[float, Option(help="Prompts and outputs are so many times as long.", rich_help_panel=_TRACE)]
PromptScale = Annotated[float, Option(help="Prompts are so many times as long.", rich_help_panel=_TRACE)]
OutputScale = Annotated[float, Option(help="Outputs are so many times as long.", rich_help_panel=_TRACE)]
Seed = Annotated[int, Option(min=0, help="Chooses the prompts' tokens; what they share stays.", rich_help_panel=_TRACE)]

Blocks = Annotated[int, Option(min=1, help=_BLOCKS_HELP, rich_help_panel=_POOL)]
BlockSize = Annotated[int, Option(min=1, help="Tokens a block.", rich_help_panel=_POOL)]
HostBlocks = Annotated[int, Option(min=0, help="Host blocks to swap to; 0: a preemption recomputes.", rich_help_panel=_POOL)]
PrefixCaching = Annotated[bool, Option("--prefix-caching/--no-prefix-caching", help="Share equal full blocks.", rich_help_panel=_POOL)]

PolicyName = Annotated[str, Option(help=_POLICY_HELP, rich_help_panel=_STEP)]
MaxTokensPerStep = Annotated[int, Option(min=1, help="Token budget of a step.", rich_help_panel=_STEP)]
MaxSequences = Annotated[int, Option(min=1, help="Sequences in a step.", rich_help_panel=_STEP)]

WeightsMs = Annotated[float, Option(help="Reading the weights, ms a step.", rich_help_panel=_TIME)]
ContextUs = Annotated[float, Option(help="Reading the KV of a token attended to, µs.", rich_help_panel=_TIME)]
TokenUs = Annotated[float, Option(help="Arithmetic of a token, µs.", rich_help_panel=_TIME)]
SwapUs = Annotated[float, Option(help="Moving a token's KV between device and host, µs.", rich_help_panel=_TIME)]

Check = Annotated[bool, Option("--check", help=_CHECK_HELP)]
Json = Annotated[bool, Option("--json", help="One JSON document on standard output, and nothing else there.")]
# fmt: on


class PoolOptions(msgspec.Struct, frozen=True):
    """How large the memory and a step are, and who decides."""

    blocks: int
    block_size: int
    host_blocks: int
    policy: str
    max_tokens_per_step: int
    max_sequences: int
    prefix_caching: bool = True

    def scheduler(self, step_time: StepTime) -> Scheduler:
        """A scheduler on an empty pool. Raises UnknownPolicy or InvalidConfig."""
        step_time.check()
        manager = BlockManager(
            self.blocks, self.block_size, host_blocks=self.host_blocks, prefix_caching=self.prefix_caching
        )
        return Scheduler(
            manager,
            policy=self.policy,
            max_tokens_per_step=self.max_tokens_per_step,
            max_sequences=self.max_sequences,
            costs=step_time.costs(self.block_size),
        )


def open_trace(name: str, *, limit: int | None, seed: int) -> Trace:
    """The trace in a file, or an excerpt by its name (a file of that name comes first). Raises TraceError or OSError."""
    path = Path(name)
    if not path.exists():
        if name not in EXCERPTS:
            known = ", ".join(sorted(EXCERPTS))
            raise FileNotFoundError(errno.ENOENT, f"no such file, nor an excerpt that ships with paged ({known})", name)
        path = excerpt_path(name)
    return read_trace(path, limit=limit, seed=seed)
