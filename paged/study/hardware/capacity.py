"""The memory that a model's sequences need on devices, and the place of their steps on the roofline.

Rates are the published ones, so that figures compare with those of others.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec

from paged.study.hardware.placement import Placement
from paged.study.hardware.roofline import Roofline
from paged.study.hardware.step_work import Spans, StepWork
from paged.study.limits import at_least

_MOST_SEQUENCES = 1 << 20
_OF_ROOFLINE = (
    "dtype", "quantize_head", "tensor_parallel", "split_context", "weight_bytes", "kv_bytes_per_token",
    "kv_bytes_per_token_of_device", "knee_tokens", "notes",
)  # fmt: skip
_OF_MODEL = ("parameters", "active_parameters", "not_modelled")
"""Figures that are the roofline's and the model's own."""


class Intensity(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of step on the roofline.

    flops_per_byte       operations a byte of memory traffic, on one device
    bound                which of the two takes longer at the published rates
    reachable_flops      operations/s of one device at this intensity
    compute_bound_from   the least number of sequences of this length in a decode step, or of tokens of one prompt, at which arithmetic takes
                         longer; None: at no possible number (prompts end at the model's length; KV grows with the sequences)
    """

    flops_per_byte: float
    bound: Literal["compute", "memory"]
    reachable_flops: float
    compute_bound_from: int | None


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Memory over all devices in bytes, unless a name says otherwise; the sequences that fit; and their steps.

    kv_bytes_per_token                              K and V of a token in all layers, each kept once
    kv_bytes                                        what the layers keep of these sequences: a window its reach, a state its size
    kv_bytes_per_token_of_all_heads, ..._all_heads  K and V if every head had its own, and all layers kept all tokens
    kv_bytes_per_token_of_device                    on one device: heads are held whole, or split by tokens (`split_context`)
    activation_bytes_of_device                      one layer's tensors for a step of max_tokens_per_step, and logits
    needed_bytes_of_device                          weights, activations and the KV of these sequences, on one device
    given_bytes_of_device                           the share of a device's memory that they may take
    num_blocks, max_sequences                       blocks of KV beside the weights, or pages of layers of several kinds, and sequences of this
                                                    length in them; 0: no room
    fewest_devices                                  the fewest devices over which the model can be split and on which these sequences fit, powers
                                                    of two first; None: no number of devices is enough
    quantization                                    how linear layers are stored where they are codes; None: in the dtype
    notes, not_modelled                             what a reader of these figures should know, and the parts of the model that they do not count
    ridge                                           operations a byte at which arithmetic and memory take equally long
    knee_tokens                                     tokens of a step at which reading the weights and multiplying by them take equally long
    """

    model: str
    device: str
    dtype: str
    kv_dtype: str
    quantization: str | None
    quantize_head: bool
    tensor_parallel: int
    split_context: bool
    batch: int
    length: int
    block_size: int
    memory_share: float
    max_tokens_per_step: int
    parameters: int
    active_parameters: int
    weight_bytes: int
    activation_bytes_of_device: int
    kv_bytes_per_token: int
    kv_bytes_per_token_of_all_heads: int
    kv_bytes_per_token_of_device: int
    kv_bytes: int
    kv_bytes_of_all_heads: int
    needed_bytes_of_device: int
    given_bytes_of_device: int
    num_blocks: int
    max_sequences: int
    fits: bool
    fewest_devices: int | None
    ridge: float
    knee_tokens: float
    prefill: Intensity
    decode: Intensity
    notes: tuple[str, ...]
    not_modelled: tuple[str, ...]


def capacity_of(
    roofline: Roofline,
    *,
    batch: int,
    length: int,
    block_size: int = 16,
    memory_share: float = 0.9,
    max_tokens_per_step: int = 2048,
) -> Capacity:
    """Return the figures of `batch` sequences of `length` tokens each. Raises InvalidConfig for a number that is out of range."""
    model = roofline.model
    sizes: dict[str, Any] = {
        "batch": batch,
        "length": length,
        "block_size": block_size,
        "max_tokens_per_step": max_tokens_per_step,
    }
    for name, value in sizes.items():
        at_least(name, value, 1, model.max_length if name == "length" else None)

    def room_for_kv(placement: Placement) -> int:
        return placement.room_for_kv(
            memory_share=memory_share, max_tokens_per_step=max_tokens_per_step, max_sequences=batch
        )

    def fits(placement: Placement) -> bool:
        return batch * placement.held_bytes(length, block_size) <= room_for_kv(placement)

    page_bytes, held = roofline.page_bytes(block_size), roofline.held_bytes(length, block_size)
    left = room_for_kv(roofline)
    num_blocks = max(left, 0) // page_bytes
    alike = partial(_alike, roofline.spans)
    given = int(roofline.device.memory_bytes * memory_share)
    per_token = roofline.kv_bytes_of(model.kv_elements_of_all_heads)
    same = {name: getattr(roofline, name) for name in _OF_ROOFLINE} | {name: getattr(model, name) for name in _OF_MODEL}
    return Capacity(
        **same,
        **sizes,
        model=model.name,
        device=roofline.device.name,
        kv_dtype=roofline.kept_dtype,
        quantization=None if roofline.codes is None else roofline.codes.title,
        memory_share=memory_share,
        activation_bytes_of_device=roofline.activation_bytes(max_tokens_per_step, batch),
        kv_bytes_per_token_of_all_heads=per_token,
        kv_bytes=roofline.kept_by(length) * batch,
        kv_bytes_of_all_heads=per_token * batch * length,
        needed_bytes_of_device=given - left + batch * held,
        given_bytes_of_device=given,
        num_blocks=num_blocks,
        max_sequences=num_blocks * page_bytes // held,
        fits=fits(roofline),
        fewest_devices=_fewest_devices(roofline, fits),
        ridge=roofline.device.ridge(roofline.dtype),
        prefill=_intensity(
            roofline, alike(batch, length, length), lambda tokens: alike(1, tokens, tokens), model.max_length
        ),
        decode=_intensity(roofline, alike(batch, 1, length), lambda rows: alike(rows, 1, length), _MOST_SEQUENCES),
    )


def _alike(spans: Spans, rows: int, new: int, length: int) -> StepWork:
    """Return the work of so many rows that each compute the last `new` of `length` tokens and sample."""
    work = StepWork.of_rows([new], [length], sampled_rows=1, spans=spans)
    names = ("computed_tokens", "sampled_rows", "context_tokens", "attended_pairs", "rows")
    return StepWork(**{name: rows * getattr(work, name) for name in names})


def _intensity(roofline: Roofline, work: StepWork, work_of: Callable[[int], StepWork], most: int) -> Intensity:
    """Place a step on the roofline, and search 1 to `most` for the least number at which the step of `work_of` is bound by arithmetic.

    Operations a byte rise with that number: operations and bytes grow with it, but the weights' bytes stay.
    """
    ridge = roofline.device.ridge(roofline.dtype)
    here = _flops_per_byte(roofline, work)
    first, last = 1, most
    while first < last:
        middle = (first + last) // 2
        if _flops_per_byte(roofline, work_of(middle)) >= ridge:
            last = middle
        else:
            first = middle + 1
    return Intensity(
        flops_per_byte=here,
        bound="compute" if here >= ridge else "memory",
        reachable_flops=min(here * roofline.device.bandwidth, roofline.device.peak(roofline.dtype)),
        compute_bound_from=first if _flops_per_byte(roofline, work_of(first)) >= ridge else None,
    )


def _flops_per_byte(roofline: Roofline, work: StepWork) -> float:
    return float(roofline.flops(work) / roofline.bytes_read(work))


def _fewest_devices(roofline: Roofline, fits: Callable[[Placement], bool]) -> int | None:
    # Powers of two first: machines have so many devices.
    degrees = sorted(roofline.degrees(), key=lambda degree: (degree & (degree - 1) > 0, degree))
    for degree in degrees if roofline.device.interconnect or roofline.link else (1,):
        link = roofline.link if degree > 1 or roofline.is_lockstep else None
        spread = msgspec.structs.replace(roofline, tensor_parallel=degree, link=link)
        if fits(spread):
            return degree
    return None
