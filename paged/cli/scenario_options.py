"""The options that `paged simulate` and `paged plan` share, and the scenarios that they describe."""

import inspect
import math
from typing import Any

import msgspec

from paged.cli import options
from paged.errors import InvalidConfig
from paged.study.hardware import device_named, model_named, usual_dtype
from paged.study.simulator import Device, Load, Scenario, StepTime, TraceFacts, grid

_TIME = StepTime()
_BLOCK_SIZE = 16


def scenarios(
    trace: options.TraceArgument,
    model: options.Model = None,
    device: options.DeviceName = None,
    profile: options.ProfilePath = None,
    published: options.Published = False,
    dtype: options.Dtype = None,
    kv_dtype: options.KvDtype = None,
    kv_dtype_skip_layers: options.KvDtypeSkipLayers = None,
    quantization: options.Quantization = None,
    quantize_head: options.QuantizeHead = False,
    tensor_parallel: options.TensorParallel = 1,
    link_gbps: options.LinkGbps = None,
    link_us: options.LinkUs = None,
    memory_share: options.MemoryShare = 0.9,
    blocks: options.Blocks = None,
    block_size: options.BlockSize = None,
    host_blocks: options.HostBlocks = 0,
    prefix_caching: options.PrefixCaching = True,
    policy: options.PolicyName = "paged",
    max_tokens_per_step: options.MaxTokensPerStep = "auto",
    max_sequences: options.MaxSequences = 256,
    limit: options.Limit = None,
    half: options.Half = None,
    keep: options.Keep = 1.0,
    rate_scale: options.RateScale = None,
    rate: options.Rate = None,
    least_span: options.LeastSpan = None,
    length_scale: options.LengthScale = 1.0,
    prompt_scale: options.PromptScale = 1.0,
    output_scale: options.OutputScale = 1.0,
    context: options.Context = None,
    over_long: options.OverLong = "reject",
    declared: options.Declared = None,
    clients: options.Clients = None,
    seed: options.Seed = 0,
    weights_ms: options.WeightsMs = _TIME.weights_ms,
    context_us: options.ContextUs = _TIME.context_us,
    token_us: options.TokenUs = _TIME.token_us,
    swap_us: options.SwapUs = _TIME.swap_us,
) -> list[Scenario]:
    """Return the scenarios: every combination of the options that take several values. Raises for a wrong one."""
    _check_read(model, profile, locals())
    shape = None if model is None else model_named(model)
    if context is None and shape is not None:
        context = shape.max_length
    load = Load(
        trace=trace,
        limit=limit,
        seed=seed,
        prompts=length_scale * prompt_scale,
        outputs=length_scale * output_scale,
        half=half,
        keep=keep,
        context=context,
        over_long=over_long,
        declared=declared,
        clients=clients,
        least_span_s=least_span,
    )
    runs_on = Device(
        model=model,
        device=device,
        dtype=dtype or (usual_dtype(shape, device_named(device)) if shape and device else "bf16"),
        kv_dtype=kv_dtype,
        kv_dtype_skip_layers=options.names_in(kv_dtype_skip_layers),
        quantization=quantization,
        quantize_head=quantize_head,
        tensor_parallel=tensor_parallel,
        link_gbps=link_gbps,
        link_us=link_us,
        memory_share=memory_share,
        profile=profile,
        published=published,
        formula=StepTime(weights_ms, context_us, token_us, swap_us),
    )
    base = Scenario(
        load=load,
        device=runs_on,
        blocks=None if model else options.DEFAULT_BLOCKS,
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
