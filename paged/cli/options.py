"""Options of the commands."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from typer import Argument, Option

import paged.study  # noqa: F401  (registers its policies)
from paged import POLICIES
from paged.base.extras import import_with_extra
from paged.base.whole_file import writable
from paged.cli.config_options import declared
from paged.errors import InvalidConfig
from paged.study.simulator import ROUTERS
from paged.study.traces import EXCERPTS

T = TypeVar("T")

_TRACE, _DEVICE, _POOL, _STEP, _OUT = "The trace", "Model and device", "The pool", "A step", "Output"
_SEARCH = "The search"
_REPLICAS = "Replicas"
_TIME = "Time of a step without a model"
VIOLATIONS_FOUND = 1
TARGETS_MISSED = 1
CORES = os.cpu_count() or 1

_TRACE_HELP = (
    "A file: Azure CSV, Mooncake JSON Lines, or our own schema in either (docs/traces.md); recognised by their content. "
    f"Or the name of an excerpt that ships with paged: {', '.join(sorted(EXCERPTS))}. Or `synthetic:…`, as in "
    "synthetic:poisson,rate=2,requests=1000,lengths=sharegpt."
)
DEFAULT_BLOCKS = 26_000
"""About what an 80 GB device holds beside an 8B model."""
_POLICY_HELP = f"The policy, one or several with commas: {', '.join(POLICIES)}. `paged policies` says what each does."
_CHECK_HELP = "Recompute every invariant before and after each update (slow); status 1 if one is violated."

# fmt: off
TraceArgument = Annotated[str, Argument(metavar="TRACE", help=_TRACE_HELP)]
Limit = Annotated[int | None, Option(min=1, help="Read only this many requests.", show_default="all", rich_help_panel=_TRACE)]
RateScale = Annotated[str | None, Option(metavar="SCALE[,…]", help="Requests arrive this many times as fast: the gaps between them are divided by it.", show_default="1", rich_help_panel=_TRACE)]
Rate = Annotated[str | None, Option(metavar="R[,…]", help="Requests a second, on average; it sets --rate-scale.", show_default="the trace's", rich_help_panel=_TRACE)]
LeastSpan = Annotated[float | None, Option("--least-span", min=0, metavar="S", help="If the requests arrive in fewer seconds than this, draw more from them at the same rate; 0: never.", show_default="until the load has settled, of a trace that is made faster", rich_help_panel=_TRACE)]
LengthScale = Annotated[float, Option(help="Prompts and outputs are this many times as long.", rich_help_panel=_TRACE)]
PromptScale = Annotated[float, Option(help="Prompts are this many times as long.", rich_help_panel=_TRACE)]
OutputScale = Annotated[float, Option(help="Outputs are this many times as long.", rich_help_panel=_TRACE)]
Seed = Annotated[int, Option(min=0, help="Seed of the prompts' tokens; shared parts stay shared.", rich_help_panel=_TRACE)]

Half = Annotated[Literal["first", "second"] | None, Option(help="Only one half of the requests: tune on one, report on the other.", show_default="all", rich_help_panel=_TRACE)]
Keep = Annotated[float, Option(metavar="SHARE", help="Only this share of the requests, drawn by the seed.", rich_help_panel=_TRACE)]
Context = Annotated[int | None, Option(min=2, help="Tokens that a request may have, prompt and output.", show_default="the model's most; without one what the pool holds", rich_help_panel=_TRACE)]
OverLong = Annotated[Literal["clip", "reject"], Option(help="Treatment of requests longer than --context.", rich_help_panel=_TRACE)]
Declared = Annotated[int | None, Option(min=1, metavar="MAX", help="Requests declare what --context leaves them as max_tokens, at most this, and write what the trace says.", show_default="exactly what they write", rich_help_panel=_TRACE)]
Clients = Annotated[int | None, Option(min=1, help="A closed loop of this many clients instead of the trace's arrivals.", show_default="none", rich_help_panel=_TRACE)]
Seeds = Annotated[int, Option(min=1, help="Simulate with this many seeds, and show the spread.", rich_help_panel=_TRACE)]

Model = Annotated[str | None, Option(help="A model's name, a checkpoint folder or its config.json, or a JSON file (docs/hardware.md).", show_default="the formula below", rich_help_panel=_DEVICE)]
DeviceName = Annotated[str | None, Option("--device", help="A device's name, or a JSON file.", show_default="none", rich_help_panel=_DEVICE)]
ProfilePath = Annotated[str | None, Option("--profile", metavar="FILE", help="Time steps by a profile that `paged profile` wrote.", show_default="the roofline of model and device", rich_help_panel=_DEVICE)]
Published = Annotated[bool, Option("--published", help="Time steps by published figures, also where the device's kernels were measured.", rich_help_panel=_DEVICE)]
Dtype = Annotated[str | None, Option(help="Dtype of weights and activations.", show_default="the model's own, or bf16, or what the device has", rich_help_panel=_DEVICE)]
Quantization = Annotated[str | None, declared("quantization", _DEVICE)]
QuantizeHead = Annotated[bool, declared("quantize_head", _DEVICE)]
KvDtype = Annotated[str | None, Option(help="Dtype of K and V; int8 and int4 with a scale for each token and head.", show_default="as --dtype; bf16 where that has 8 bits", rich_help_panel=_DEVICE)]
KvDtypeSkipLayers = Annotated[str | None, Option("--kv-dtype-skip-layers", metavar="LAYERS", help="Layers whose K and V stay in --dtype beside others in int8 or int4: sliding_window, chunk.", show_default="none", rich_help_panel=_DEVICE)]
TensorParallel = Annotated[int, Option(min=1, help="Devices over which the model is split.", rich_help_panel=_DEVICE)]
LinkGbps = Annotated[float | None, Option("--link-gbps", metavar="GB/S", help="Gigabytes a second of the link between devices, one way.", show_default="as measured, or by the device's sheet (docs/hardware.md)", rich_help_panel=_DEVICE)]
LinkUs = Annotated[float | None, Option("--link-us", metavar="µS", help="Microseconds of a message on that link beside its bytes.", show_default="as measured; PCIe 12, NVLink 5", rich_help_panel=_DEVICE)]
MemoryShare = Annotated[float, Option(help="Share of the device's memory that may be used.", rich_help_panel=_DEVICE)]
PricePerHour = Annotated[float | None, Option(help="Price of a replica with all of its devices; gives the cost per million output tokens.", show_default="none", rich_help_panel=_DEVICE)]

Blocks = Annotated[str | None, Option(metavar="N[,…]", help="Device blocks; of a model whose layers are of several kinds, pages.", show_default="what the device has left; 26,000 without one", rich_help_panel=_POOL)]
BlockSize = Annotated[int | None, Option(min=1, help="Tokens a block.", show_default="16, or 32 where layers of several kinds want it", rich_help_panel=_POOL)]
HostBlocks = Annotated[int, Option(min=0, help="Host blocks to swap to; 0: a preemption recomputes. Not with layers of several kinds.", rich_help_panel=_POOL)]
PrefixCaching = Annotated[bool, Option("--prefix-caching/--no-prefix-caching", help="Share equal full blocks.", rich_help_panel=_POOL)]

PolicyName = Annotated[str, Option(help=_POLICY_HELP, rich_help_panel=_STEP)]
MaxTokensPerStep = Annotated[str, Option(metavar="N|auto|knee|own[,…]", help="Token budget of a step. auto: one that suits model and device, of paged plan the targets, too (2,048 without a model); knee: where the roofline of model and device has it; own: what each policy's system uses.", rich_help_panel=_STEP)]
MaxSequences = Annotated[int, Option(min=1, help="Sequences in a step.", rich_help_panel=_STEP)]

Replicas = Annotated[int, Option(min=1, help="Replicas, each a pool and a scheduler of its own.", rich_help_panel=_REPLICAS)]
RouterName = Annotated[str, Option("--router", metavar="NAME[,…]", help=f"Router of requests among them: {', '.join(ROUTERS)} (docs/routing.md).", rich_help_panel=_REPLICAS)]
Ingresses = Annotated[int, Option(min=1, help="Number of such routers; requests come to them in turn.", rich_help_panel=_REPLICAS)]
EventDelay = Annotated[float, Option("--event-delay", min=0.0, metavar="S", help="For exact: seconds until a replica's report arrives.", rich_help_panel=_REPLICAS)]
ReportEvery = Annotated[float, Option("--report-every", min=0.0, metavar="S", help="For exact: seconds between two reports of a replica's load.", rich_help_panel=_REPLICAS)]

FindWhat = Annotated[Literal["rate", "memory", "devices"], Option("--find", help="The highest rate, the smallest memory (blocks), or the fewest devices (replicas, to which requests are dealt in turn).", show_default=False, rich_help_panel=_SEARCH)]
Ttft = Annotated[float | None, Option("--ttft", metavar="S", help="Target: p99 of the time to first token, in seconds.", show_default="no target", rich_help_panel=_SEARCH)]
Gap = Annotated[float | None, Option("--gap", metavar="S", help="Target: p99 of each request's longest time between two tokens, in seconds.", show_default="no target", rich_help_panel=_SEARCH)]
Itl = Annotated[float | None, Option("--itl", metavar="S", help="Target: p99 of all times between two tokens, in seconds. It hides the cost of preemptions; --gap does not.", show_default="no target", rich_help_panel=_SEARCH)]
Explain = Annotated[bool, Option("--explain/--no-explain", help="Also find the limit that binds the answer: raise each one a step, and compare.", rich_help_panel=_SEARCH)]
ReplicaPrice = Annotated[float | None, Option("--price-per-hour", help="Price of a replica with all of its devices; gives the cost of the answer per hour and per million output tokens.", show_default="none", rich_help_panel=_DEVICE)]
PlanCsvPath = Annotated[Path | None, Option("--csv", help="Also write a table with a row for each tried value.", rich_help_panel=_OUT)]
Tolerance = Annotated[float | None, Option(help="Largest distance of the answer from the nearest value that misses, as a share.", show_default="0.02 of a rate; 0.01 of a memory, or one block", rich_help_panel=_SEARCH)]
MetSeeds = Annotated[int, Option("--seeds", min=1, help="The targets have to be met with each of this many seeds.", rich_help_panel=_SEARCH)]

WeightsMs = Annotated[float, Option(help="Time to read the weights, ms a step.", rich_help_panel=_TIME)]
ContextUs = Annotated[float, Option(help="Time to read the KV of a token attended to, µs.", rich_help_panel=_TIME)]
TokenUs = Annotated[float, Option(help="Time to compute a token, µs.", rich_help_panel=_TIME)]
SwapUs = Annotated[float, Option(help="Time to move a token's KV between device and host, µs.", rich_help_panel=_TIME)]

Check = Annotated[bool, Option("--check", help=_CHECK_HELP)]
Jobs = Annotated[int, Option(min=1, help="Processes for several simulations.", show_default="all cores")]
CsvPath = Annotated[Path | None, Option("--csv", help="Also write a table with a row for each simulation.", rich_help_panel=_OUT)]
HtmlPath = Annotated[Path | None, Option("--html", help="Also write a report with plots, one file that loads nothing else.", rich_help_panel=_OUT)]
EventsPath = Annotated[Path | None, Option("--trace-events", help="Also write steps, memory and requests for Perfetto (one simulation only).", rich_help_panel=_OUT)]
LogPath = Annotated[Path | None, Option("--log", help="Also write every decision, a JSON line for each step (one simulation only).", rich_help_panel=_OUT)]
Json = Annotated[bool, Option("--json", help="One JSON document on standard output, and nothing else there.")]
# fmt: on


def listed(text: str, what: str, kind: Callable[[str], T]) -> list[T]:
    """Return the values between commas. Raises InvalidConfig, which names the wrong part and the right kind."""
    parts = []
    for part in text.split(","):
        try:
            parts.append(kind(part.strip()))
        except ValueError:
            several = ", or several with commas between" if "," not in text else " between commas"
            raise InvalidConfig(f'{what} takes {_KINDS[kind]}{several}; got "{part.strip()}"') from None
    return parts


def chosen(text: str, what: str, known: Collection[str]) -> list[str]:
    """Return the values between commas, each once. Raises InvalidConfig for an unknown one."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [each for each in found if each not in known]:
        raise InvalidConfig(f'{what} takes {", ".join(known)}, or several with commas between; got "{unknown[0]}"')
    return found


def names_in(text: str | None) -> tuple[str, ...]:
    """Return the names between commas."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ()


def count(text: str) -> int:
    """Return a whole number of at least 1. Raises ValueError."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def budget(text: str) -> int | Literal["auto", "knee", "own"]:
    """Return a token budget. Raises ValueError."""
    return text if text in ("auto", "knee", "own") else count(text)  # type: ignore[return-value]


_KINDS: dict[Callable[[str], object], str] = {
    float: "a number",
    count: "a whole number of at least 1",
    budget: "a whole number of at least 1, auto, knee or own",
}


def check_outputs(written: Mapping[str, Path | None], read: Iterable[str | Path | None] = ()) -> None:
    """Check an option's file before a long run. Raises InvalidConfig for the file of another option, or one that is `read`; UnwritablePath;
    and MissingExtra for plots that cannot be drawn."""
    names = {os.path.realpath(path): "" for path in read if path and Path(path).exists()}
    for option, path in written.items():
        if path is None:
            continue
        writable(path)
        other = names.setdefault(os.path.realpath(path), option)
        if not other:
            raise InvalidConfig(f"{option} would overwrite {path}, which is read; give it another file")
        if other is not option:
            raise InvalidConfig(f"{other} and {option} are both {path}; give each a file of its own")
    if written.get("--html") is not None:
        import_with_extra("plotly", "study.report")
