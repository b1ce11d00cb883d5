"""`paged capacity`: the memory and time that a model's sequences need on a device, by `paged.study.hardware`."""

import math
from typing import Annotated

import msgspec
import typer
from typer import Argument, Option

from paged.base.budget import as_bytes, short
from paged.base.words import counted
from paged.cli.commands import made_of, must_be_read
from paged.cli.options import Json, KvDtype, KvDtypeSkipLayers, MemoryShare, Quantization, QuantizeHead, names_in
from paged.cli.show import figures, print_json
from paged.errors import InvalidConfig, NotModelled, UnknownModel
from paged.model.layer_plan import Group, LayerPlan, plan_layers
from paged.study.hardware import (
    DTYPES,
    KV_DTYPES,
    Capacity,
    Intensity,
    Kept,
    Roofline,
    Spans,
    StepWork,
    capacity_of,
    device_named,
    device_names,
    kept_as,
    layers_named,
    model_named,
    model_names,
    published_layers,
    suiting_budget,
    usual_dtype,
)
from paged.study.hardware.measured import step_of, timed_by
from paged.study.hardware.measured_step import MeasuredStep
from paged.study.hardware.placement import check_skipped

_LENGTHS = (1024, 8192, 32768, 131072)
_MODEL_HELP = f"{', '.join(model_names())}; for its pages alone {', '.join(sorted({*published_layers()} - {*model_names()}))}; a publisher's name; embedded or hybrid, which ship with weights; a checkpoint folder or its config.json; or a .json file of your own (docs/hardware.md)."
_DEVICE_HELP = f"{', '.join(device_names())}; or a .json file of your own."
_LEFT_OUT = "weights, activations and steps of this model: its pages alone are known"
_OF_PAGES = ("model", "dtype", "kv_dtype", "kv_dtype_skip_layers", "block_size", "json")
"""Parameters that change pages."""
_STEP_HELP = "Token budget of a step: activations are for so many."


def capacity(
    context: typer.Context,
    model: Annotated[str, Argument(metavar="MODEL", help=_MODEL_HELP)],
    device: Annotated[str, Option(help=_DEVICE_HELP)] = "a100-80g",
    dtype: Annotated[str | None, Option(help=f"Dtype of weights and activations: {', '.join(DTYPES)}.", show_default="the model's own, or bf16, or what the device has")] = None,
    quantization: Quantization = None,
    quantize_head: QuantizeHead = False,
    kv_dtype: KvDtype = None,
    kv_dtype_skip_layers: KvDtypeSkipLayers = None,
    batch: Annotated[int, Option(min=1, help="Sequences.")] = 16,
    length: Annotated[int, Option(min=1, help="Tokens of each sequence.")] = 1024,
    tensor_parallel: Annotated[int, Option(min=1, help="Devices that each layer is split over.")] = 1,
    block_size: Annotated[int | None, Option(min=1, help="Tokens a block.", show_default="16, or 32 where layers of several kinds want it")] = None,
    split_context: Annotated[bool, Option("--split-context", help="Devices that split the tokens of a shared KV head or latent.")] = False,
    memory_share: MemoryShare = 0.9,
    max_tokens_per_step: Annotated[int | None, Option(min=1, help=_STEP_HELP, show_default="one that suits model and device")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Show what a model needs on a device: weights, activations, KV, how many sequences fit, and what binds its steps.

    Memory and operations follow from the model's shape and the device's published figures. A step's time follows from measured kernels if
    they ship, and "timed by" says so. 1 GB is 10^9 bytes.

    Example: `paged capacity llama-2-70b --device h100 --tensor-parallel 4`
    """
    placed, skip_layers = device_named(device), names_in(kv_dtype_skip_layers)
    try:
        shape = model_named(model)
    except (UnknownModel, NotModelled):
        _pages_alone(context, model, kv_dtype, skip_layers, dtype or "bf16", block_size, json=json)
        return
    used = dtype or usual_dtype(shape, placed)
    roofline = made_of(Roofline, locals(), model=shape, device=placed, dtype=used, kv_dtype_skip_layers=skip_layers)
    kept, plan = _planned(model, roofline.kept_dtype, skip_layers, roofline.dtype, block_size)
    block_size = plan.block_size
    if max_tokens_per_step is None:
        max_tokens_per_step = suiting_budget(roofline, max_sequences=batch, block_size=block_size)
    found = capacity_of(
        roofline,
        batch=batch,
        length=length,
        block_size=block_size,
        memory_share=memory_share,
        max_tokens_per_step=max_tokens_per_step,
    )
    step = step_of(roofline)
    seconds = {name: float(step.seconds(work)) for name, work in _steps(batch, length, roofline.spans).items()}
    notes = [*found.notes, *(step.layers.notes if isinstance(step, MeasuredStep) else ())]
    if json:
        said = {"timed_by": timed_by(step), "step_s": seconds, "notes": notes}
        print_json({**msgspec.to_builtins(found), **said, **_plan_document(kept, plan)})
        return
    place = f"{found.tensor_parallel} × {found.device}"
    figures(f"{found.model} in {found.dtype} on {place}: memory", _memory(found, roofline))
    shown = [(name, f"{1e3 * value:,.1f} ms") for name, value in seconds.items()]
    figures(f"a step on {place}", [*shown, ("timed by", timed_by(step)), *(("note", note) for note in notes)])
    figures(f"operations a byte, {found.device} in {found.dtype}", _arithmetic(found, roofline))
    _show_pages(kept, plan, shape.max_length)
    if found.not_modelled:
        figures(f"not modelled of {found.model}", [("not modelled", each) for each in found.not_modelled])


def _pages_alone(
    context: typer.Context,
    name: str,
    kv_dtype: str | None,
    kv_dtype_skip_layers: tuple[str, ...],
    dtype: str,
    block_size: int | None,
    *,
    json: bool,
) -> None:
    """Show the pages of a model whose weights and steps are not modelled. Raises InvalidConfig for an option that changes no page."""
    for option, given, known in (("dtype", dtype, tuple(DTYPES)), ("kv_dtype", kv_dtype or dtype, KV_DTYPES)):
        if given not in known:
            raise InvalidConfig(f'{option} is "{given}"; known are {", ".join(known)}')
    kept, plan = _planned(name, kv_dtype or kept_as(dtype), kv_dtype_skip_layers, dtype, block_size)
    must_be_read(context, _OF_PAGES, f"changes no page of {kept.name}, of which nothing else is known")
    if json:
        print_json({"model": kept.name, **_plan_document(kept, plan), "not_modelled": [_LEFT_OUT]})
        return
    _show_pages(kept, plan)
    figures(f"not modelled of {kept.name}", [("not modelled", _LEFT_OUT)])


def _planned(
    name: str, kv_dtype: str, kv_dtype_skip_layers: tuple[str, ...], dtype: str, block_size: int | None
) -> tuple[Kept, LayerPlan]:
    kept = layers_named(name, kv_dtype=kv_dtype, kv_dtype_skip_layers=kv_dtype_skip_layers, floats=kept_as(dtype))
    check_skipped(name, kept.layers, kv_dtype, kv_dtype_skip_layers)
    return kept, plan_layers(kept.layers, block_size=block_size)


def _plan_document(kept: Kept, plan: LayerPlan) -> dict[str, object]:
    lengths = {str(length): {"held": plan.held_bytes(length), "kept": plan.kept_bytes(length)} for length in _LENGTHS}
    return {"pages": {**msgspec.to_builtins(plan), "bytes_of_a_sequence": lengths, "doubt": kept.doubt}}


def _show_pages(kept: Kept, plan: LayerPlan, longest: int = _LENGTHS[-1]) -> None:
    """Show layer groups, and what a sequence holds; in one line if all layers keep all tokens."""
    page, doubt = as_bytes(plan.page_bytes), [("not sure", kept.doubt)] if kept.doubt else []
    if [group.name for group in plan.groups] == ["full"]:
        of_block = _of_group(plan.groups[0], plan)
        figures(f"pages of {kept.name}", [("pages", f"{page} each over all devices: {of_block}"), *doubt])
        return
    sizes = {group.block_tokens for group in plan.groups if group.block_tokens}
    of_engine = f"has blocks of one size for all groups: see --block-size {math.lcm(*sizes)}"
    rows = [
        ("page", f"{page} over all devices"),
        *((group.name, _of_group(group, plan)) for group in plan.groups),
        *doubt,
        *([("an engine", of_engine)] if len(sizes) > 1 else []),
        *((f"a sequence of {length:,}", _of_sequence(plan, length)) for length in _LENGTHS if length <= longest),
    ]
    figures(f"pages of {kept.name}", rows)


def _of_group(group: Group, plan: LayerPlan) -> str:
    of = f"block of {counted(group.block_tokens, 'token')}" if group.block_tokens else "sequence"
    filled = group.used_bytes / (group.pages * plan.page_bytes)
    return f"{counted(group.num_layers, 'layer')}, {counted(group.pages, 'page')} a {of}, {filled:.1%} filled"


def _of_sequence(plan: LayerPlan, length: int) -> str:
    held, kept, full = plan.held_bytes(length), plan.kept_bytes(length), plan.bytes_if_full(length)
    more = f"; {full / held:.2f} × if windows and chunks kept all" if full > held else ""
    return f"{as_bytes(held)} held, {kept / held:.1%} of it needed{more}"


def _steps(batch: int, length: int, spans: Spans) -> dict[str, StepWork]:
    """Return the work of a step with a prompt, and of one with decoding sequences."""
    return {
        f"a prompt of {length:,}": StepWork.of_rows([length], [length], sampled_rows=1, spans=spans),
        f"{batch:,} decoding at {length:,}": StepWork.of_rows(
            [1] * batch, [length] * batch, sampled_rows=batch, spans=spans
        ),
    }


def _memory(found: Capacity, roofline: Roofline) -> list[tuple[str, str]]:
    model = roofline.model
    kept = "as one latent for all heads" if model.latent else f"with its {counted(model.kv_heads, 'KV head')}"
    own = "if every head had its own K and V"
    parameters = f"{found.parameters:,} parameters"
    if found.active_parameters != found.parameters:
        parameters += f", {found.active_parameters:,} of them active for a token"
    each = f"{as_bytes(found.needed_bytes_of_device)} wanted, {as_bytes(found.given_bytes_of_device)} may be used"
    if found.fits:
        verdict = "fits"
    elif found.fewest_devices is None:
        verdict = "does not fit"
        if roofline.device.interconnect:
            verdict += f" on as many devices as its heads can be split over, {max(roofline.degrees()):,}"
    else:
        verdict = f"does not fit; {found.fewest_devices} × {found.device} would do (--tensor-parallel)"
    room = f"{counted(found.num_blocks, 'block')} of {counted(found.block_size, 'token')}"
    if model.kept:
        room = f"{counted(found.num_blocks, 'page')} of {as_bytes(roofline.page_bytes(found.block_size))}"
    room += f"; {counted(found.max_sequences, 'sequence')} of {counted(found.length, 'token')}"
    dtype = found.dtype if found.quantization is None else f"{found.quantization} and {found.dtype}"
    return [
        ("weights", f"{as_bytes(found.weight_bytes)} in {dtype}: {parameters}"),
        (
            "activations",
            f"{as_bytes(found.activation_bytes_of_device)} a device for a step of {found.max_tokens_per_step:,} tokens, {counted(found.batch, 'row')} sampled",
        ),
        (
            "KV of a token",
            f"{as_bytes(found.kv_bytes_per_token)} {kept}; {as_bytes(found.kv_bytes_per_token_of_all_heads)} {own}",
        ),
        (
            f"KV of {found.batch:,} × {found.length:,}",
            f"{as_bytes(found.kv_bytes)} {kept}; {as_bytes(found.kv_bytes_of_all_heads)} {own}",
        ),
        ("each device", f"{each} ({found.memory_share:.0%}): {verdict}"),
        ("room for", room),
    ]


def _arithmetic(found: Capacity, roofline: Roofline) -> list[tuple[str, str]]:
    peak = roofline.device.peak(found.dtype)
    ridge = (
        f"{short(found.ridge)} FLOP/byte: {short(peak / 1e12)} TFLOP/s ÷ {short(roofline.device.bandwidth / 1e12)} TB/s"
    )
    first, rows = found.prefill.compute_bound_from, found.decode.compute_bound_from
    prompts = f"a prompt of {first:,} tokens or more is compute-bound" if first else "no prompt is compute-bound"
    sequences = (
        f"compute-bound from {counted(rows, 'sequence')}"
        if rows
        else "never compute-bound, as KV grows with the sequences"
    )
    return [
        ("ridge of the device", ridge),
        (f"prefill of {found.batch:,} × {found.length:,}", _bound(found.prefill, peak, prompts)),
        (f"decode of {found.batch:,} at {found.length:,}", _bound(found.decode, peak, sequences)),
        ("knee", f"{short(found.knee_tokens)} tokens a step: as long for their arithmetic as to read the weights"),
    ]


def _bound(step: Intensity, peak: float, threshold: str) -> str:
    share = step.reachable_flops / peak
    return f"{short(step.flops_per_byte)} FLOP/byte, {step.bound}-bound: {share:.0%} of the peak at most; {threshold}"
