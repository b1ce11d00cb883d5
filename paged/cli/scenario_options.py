"""The options that `paged simulate` and `paged plan` share, and the scenarios that they describe."""

import inspect
import math
from typing import Annotated, Any, Literal

import msgspec
from typer import Argument, Option

import paged.study  # noqa: F401  (registers its policies)
from paged import POLICIES
from paged.cli import options
from paged.cli.commands import made_of
from paged.cli.options import DEVICE, TRACE
from paged.errors import InvalidConfig
from paged.study.hardware import device_named, model_named, usual_dtype
from paged.study.simulator import Device, Load, Scenario, StepTime, TraceFacts, grid
from paged.study.traces import EXCERPTS

_POOL, _STEP, _TIME = "The pool", "A step", "Time of a step without a model"
_TRACE_HELP = (
    "A file: Azure CSV, Mooncake JSON Lines, or our own schema in either (docs/traces.md); recognised by their content. "
    f"Or the name of an excerpt that ships with paged: {', '.join(sorted(EXCERPTS))}. Or `synthetic:…`, as in "
    "synthetic:poisson,rate=2,requests=1000,lengths=sharegpt."
)
_POLICY_HELP = f"The policy, one or several with commas: {', '.join(POLICIES)}. `paged policies` says what each does."
_DEFAULT_BLOCKS = 26_000
"""About what an 80 GB device holds beside an 8B model."""
_FORMULA = StepTime()
_BLOCK_SIZE = 16


def scenarios(
    trace: Annotated[str, Argument(metavar="TRACE", help=_TRACE_HELP)],
    model: Annotated[str | None, Option(help="A model's name, a checkpoint folder or its config.json, or a JSON file (docs/hardware.md).", show_default="the formula below", rich_help_panel=DEVICE)] = None,
    device: Annotated[str | None, Option("--device", help="A device's name, or a JSON file.", show_default="none", rich_help_panel=DEVICE)] = None,
    profile: Annotated[str | None, Option("--profile", metavar="FILE", help="Time steps by a profile that `paged profile` wrote.", show_default="the roofline of model and device", rich_help_panel=DEVICE)] = None,
    published: Annotated[bool, Option("--published", help="Time steps by published figures, also where the device's kernels were measured.", rich_help_panel=DEVICE)] = False,
    dtype: Annotated[str | None, Option(help="Dtype of weights and activations.", show_default="the model's own, or bf16, or what the device has", rich_help_panel=DEVICE)] = None,
    kv_dtype: options.KvDtype = None,
    kv_dtype_skip_layers: options.KvDtypeSkipLayers = None,
    quantization: options.Quantization = None,
    quantize_head: options.QuantizeHead = False,
    tensor_parallel: Annotated[int, Option(min=1, help="Devices over which the model is split.", rich_help_panel=DEVICE)] = 1,
    link_gbps: options.LinkGbps = None,
    link_us: options.LinkUs = None,
    memory_share: options.MemoryShare = 0.9,
    blocks: Annotated[str | None, Option(metavar="N[,…]", help="Device blocks; of a model whose layers are of several kinds, pages.", show_default="what the device has left; 26,000 without one", rich_help_panel=_POOL)] = None,
    block_size: Annotated[int | None, Option(min=1, help="Tokens a block.", show_default="16, or 32 where layers of several kinds want it", rich_help_panel=_POOL)] = None,
    host_blocks: Annotated[int, Option(min=0, help="Host blocks to swap to; 0: a preemption recomputes. Not with layers of several kinds.", rich_help_panel=_POOL)] = 0,
    prefix_caching: Annotated[bool, Option("--prefix-caching/--no-prefix-caching", help="Share equal full blocks.", rich_help_panel=_POOL)] = True,
    policy: Annotated[str, Option(help=_POLICY_HELP, rich_help_panel=_STEP)] = "paged",
    max_tokens_per_step: Annotated[str, Option(metavar="N|auto|knee|own[,…]", help="Token budget of a step. auto: one that suits model and device, of paged plan the targets, too (2,048 without a model); knee: where the roofline of model and device has it; own: what each policy's system uses.", rich_help_panel=_STEP)] = "auto",
    max_sequences: Annotated[int, Option(min=1, help="Sequences in a step.", rich_help_panel=_STEP)] = 256,
    limit: Annotated[int | None, Option(min=1, help="Read only this many requests.", show_default="all", rich_help_panel=TRACE)] = None,
    half: Annotated[Literal["first", "second"] | None, Option(help="Only one half of the requests: tune on one, report on the other.", show_default="all", rich_help_panel=TRACE)] = None,
    keep: Annotated[float, Option(metavar="SHARE", help="Only this share of the requests, drawn by the seed.", rich_help_panel=TRACE)] = 1.0,
    rate_scale: Annotated[str | None, Option(metavar="SCALE[,…]", help="Requests arrive this many times as fast: the gaps between them are divided by it.", show_default="1", rich_help_panel=TRACE)] = None,
    rate: Annotated[str | None, Option(metavar="R[,…]", help="Requests a second, on average; it sets --rate-scale.", show_default="the trace's", rich_help_panel=TRACE)] = None,
    least_span: Annotated[float | None, Option("--least-span", min=0, metavar="S", help="If the requests arrive in fewer seconds than this, draw more from them at the same rate; 0: never.", show_default="until the load has settled, of a trace that is made faster", rich_help_panel=TRACE)] = None,
    length_scale: Annotated[float, Option(help="Prompts and outputs are this many times as long.", rich_help_panel=TRACE)] = 1.0,
    prompt_scale: Annotated[float, Option(help="Prompts are this many times as long.", rich_help_panel=TRACE)] = 1.0,
    output_scale: Annotated[float, Option(help="Outputs are this many times as long.", rich_help_panel=TRACE)] = 1.0,
    context: Annotated[int | None, Option(min=2, help="Tokens that a request may have, prompt and output.", show_default="the model's most; without one what the pool holds", rich_help_panel=TRACE)] = None,
    over_long: Annotated[Literal["clip", "reject"], Option(help="Treatment of requests longer than --context.", rich_help_panel=TRACE)] = "reject",
    declared: Annotated[int | None, Option(min=1, metavar="MAX", help="Requests declare what --context leaves them as max_tokens, at most this, and write what the trace says.", show_default="exactly what they write", rich_help_panel=TRACE)] = None,
    clients: Annotated[int | None, Option(min=1, help="A closed loop of this many clients instead of the trace's arrivals.", show_default="none", rich_help_panel=TRACE)] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the prompts' tokens; shared parts stay shared.", rich_help_panel=TRACE)] = 0,
    weights_ms: Annotated[float, Option(help="Time to read the weights, ms a step.", rich_help_panel=_TIME)] = _FORMULA.weights_ms,
    context_us: Annotated[float, Option(help="Time to read the KV of a token attended to, µs.", rich_help_panel=_TIME)] = _FORMULA.context_us,
    token_us: Annotated[float, Option(help="Time to compute a token, µs.", rich_help_panel=_TIME)] = _FORMULA.token_us,
    swap_us: Annotated[float, Option(help="Time to move a token's KV between device and host, µs.", rich_help_panel=_TIME)] = _FORMULA.swap_us,
) -> list[Scenario]:  # fmt: skip
    """Return the scenarios: every combination of the options that take several values. Raises for a wrong one."""
    given = dict(locals())
    _check_read(model, profile, given)
    shape = None if model is None else model_named(model)
    load = made_of(
        Load,
        given,
        rate=1.0,
        prompts=length_scale * prompt_scale,
        outputs=length_scale * output_scale,
        context=shape.max_length if context is None and shape is not None else context,
        least_span_s=least_span,
    )
    runs_on = made_of(
        Device,
        given,
        dtype=dtype or (usual_dtype(shape, device_named(device)) if shape and device else "bf16"),
        kv_dtype_skip_layers=options.names_in(kv_dtype_skip_layers),
        formula=StepTime(weights_ms, context_us, token_us, swap_us),
    )
    base = Scenario(
        load=load,
        device=runs_on,
        blocks=None if model else _DEFAULT_BLOCKS,
        block_size=block_size or _block_size(runs_on),
        host_blocks=host_blocks,
        prefix_caching=prefix_caching,
        max_sequences=max_sequences,
    )
    found = grid(
        base,
        policies=[name.strip() for name in policy.split(",")],
        blocks=options.listed(blocks, "--blocks", options.count) if blocks else (),
        rates=_rate_scales(load, rate_scale, rate),
        budgets=options.listed(max_tokens_per_step, "--max-tokens-per-step", options.budget),
    )
    for scenario in found:
        scenario.scheduler()
    # A trace that is made faster also ends sooner, so draw it longer. One as it was recorded stays as it is, with a note if it is short.
    return [scenario.settled() if scenario.load.rate > 1 else scenario for scenario in found]


def _block_size(device: Device) -> int:
    """Return the tokens a block of the plan of a model's layers; 16 without one."""
    roofline = device.roofline()
    plan = None if roofline is None else roofline.plan(None)
    return plan.block_size if plan else _BLOCK_SIZE


def _check_read(model: str | None, profile: Any, given: dict[str, Any]) -> None:
    """Raise InvalidConfig for a given option that would change nothing."""
    unread: dict[str, str] = {}
    if model is None:
        unread |= dict.fromkeys(
            (
                "dtype",
                "kv_dtype",
                "kv_dtype_skip_layers",
                "quantization",
                "quantize_head",
                "tensor_parallel",
                "link_gbps",
                "link_us",
                "memory_share",
                "published",
            ),
            "goes with --model and --device",
        )
    if model is not None or profile is not None:
        why = f"is for steps without a model; {'--model' if profile is None else '--profile'} times them here"
        unread |= dict.fromkeys(("weights_ms", "context_us", "token_us", "swap_us"), why)
    for name, why in unread.items():
        if given[name] != _PARAMETERS[name].default:
            raise InvalidConfig(f"--{name.replace('_', '-')} {why}")


def _rate_scales(load: Load, rate_scale: str | None, rate: str | None) -> list[float]:
    """Return how many times as fast requests arrive: `rate_scale`, or `rate` over the rate of the trace itself."""
    if rate is None:
        return options.listed(rate_scale or "1", "--rate-scale", float)
    if rate_scale is not None:
        raise InvalidConfig(
            f"--rate {rate} and --rate-scale {rate_scale} both say how fast requests arrive; leave one out"
        )
    rates = options.listed(rate, "--rate", float)
    per_s = TraceFacts.of(msgspec.structs.replace(load, least_span_s=None).build(), is_open=load.clients is None).per_s
    if per_s is None:
        why = "all arrive at once" if load.clients is None else f"each of {load.clients} clients waits for its answer"
        raise InvalidConfig(f"--rate {rate}: these requests have no rate, since {why}; leave it out")
    for wanted in rates:
        if not (math.isfinite(wanted) and wanted > 0):
            raise InvalidConfig(f"--rate is {wanted:g}; it must be a finite number above 0, requests a second")
    return [wanted / per_s for wanted in rates]


_PARAMETERS = inspect.signature(scenarios).parameters


def files_of(scenario: Scenario) -> list[str | None]:
    """Return the paths that a scenario may read; names of what ships are among them."""
    return [scenario.load.trace, scenario.device.profile, scenario.device.model, scenario.device.device]


def device_document(device: Device) -> dict[str, object]:
    """Return the device's part in the JSON of a simulation or a plan."""
    return {
        "model": device.model,
        "device": device.device,
        "kv_dtype": device.kv_dtype,
        "kv_dtype_skip_layers": device.kv_dtype_skip_layers,
        "quantization": device.codes(),
        "quantize_head": device.quantize_head,
        "timed_by": device.timed_by(),
        "not_modelled": device.not_modelled(),
    }
