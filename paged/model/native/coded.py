"""Linear layers whose weights are codes of 8 or 4 bits, packed once and held nowhere else.

Inputs are rounded to 8 bits in pieces of 128, so a row's results do not depend on the number of rows (codes.c).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from paged.attention.native.backend import ELEMENTS
from paged.errors import BuildFailed
from paged.model.native.large_pages import aligned, on_large_pages
from paged.model.native.packed import NativeLinear, Product, model_library
from paged.model.quantised.names import BITS
from paged.model.quantised.weights import QuantisedWeight, quantise
from paged.model.threads import THREADS

_pointer, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
# The inputs of a group are padded to a multiple of this.
_FILL = 8
_TRIAL_ROWS = 19
# One and a half pieces.
_TRIAL_GROUP = 192


class CCodes(ctypes.Structure):
    """paged_codes of codes.h."""

    _fields_ = (
        ("scales", _pointer),
        ("zeros", _pointer),
        ("order", _pointer),
        ("group", _int64),
        ("bits", _int32),
        ("zero", _int32),
    )


@cache
def coded_library() -> Any:
    """Return the C functions. Raises BuildFailed, also if products are wrong as compiled, or depend on the number of rows."""
    found = model_library()
    found.paged_codes_room.argtypes = [ctypes.POINTER(CCodes), _int64, _int64]
    found.paged_codes_room.restype = _int64
    found.paged_mixed_products.argtypes = [*found.paged_products.argtypes, _pointer]
    found.paged_code_row.argtypes = [ctypes.POINTER(CCodes), _pointer, _int64, _int64, _pointer]
    with THREADS.at_most(1):
        for bits in BITS.values():
            _check(found, bits)
    return found


class PackedCodes(nn.Module):
    """A weight [outs, depth] in codes, packed as in codes.h; `c` describes it for C."""

    def __init__(self, weight: QuantisedWeight, columns: int) -> None:
        super().__init__()
        self.outs, self.depth, self.bits, self.group_size = weight.outs, weight.depth, weight.bits, weight.group_size
        self._columns, zeros = columns, weight.zeros
        self.is_symmetric = bool((zeros == zeros.flatten()[0]).all())
        self.codes = _held(_packed_codes(weight, columns))
        self.scales = _held(_panels(weight.scales.float(), columns))
        self.zeros = None if self.is_symmetric else _held(_panels(zeros, columns))
        self.order = None if weight.order is None else _held(weight.order.long().contiguous())
        self.c = CCodes(
            scales=self.scales.data_ptr(),
            zeros=None if self.zeros is None else self.zeros.data_ptr(),
            order=None if self.order is None else self.order.data_ptr(),
            group=weight.group_size,
            bits=weight.bits,
            zero=int(zeros.flatten()[0]),
        )

    @property
    def weight(self) -> QuantisedWeight:
        """The weight that was packed, a new copy each time."""
        groups = self.depth // self.group_size
        words = self.codes.permute(0, 2, 1, 3)
        if self.bits == 4:
            words = torch.stack([words & 15, words >> 4], 3)
        codes = words.reshape(-1, groups, _filled(self.group_size))[: self.outs, :, : self.group_size]
        scales = self.scales.transpose(1, 2).reshape(-1, groups)[: self.outs]
        if self.zeros is None:
            zeros = torch.full_like(scales, self.c.zero, dtype=torch.uint8)
        else:
            zeros = self.zeros.transpose(1, 2).reshape(-1, groups)[: self.outs]
        return QuantisedWeight(
            codes=codes.reshape(self.outs, self.depth),
            scales=scales,
            zeros=zeros,
            bits=self.bits,
            group_size=self.group_size,
            order=self.order,
        )

    def multiply(self, x: Tensor, bias: Tensor | None, *, functions: Any = None, rows: int | None = None) -> Tensor:
        """Return x [n, depth] times the weight, plus a bias, float32 [outs]: float32 [n, outs]. With `rows` only the first rows are computed; others are 0."""
        functions = functions or coded_library()
        x = (x if x.dtype in ELEMENTS else x.float()).contiguous()
        rows = len(x) if rows is None else rows
        to = torch.empty(len(x), self.outs)
        to[rows:] = 0
        work = aligned(functions.paged_codes_room(ctypes.byref(self.c), rows, self.depth))
        product = Product(
            packed=self.codes.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            to=to.data_ptr(),
            outs=self.outs,
            to_stride=self.outs,
            codes=ctypes.addressof(self.c),
        )
        element, one = ELEMENTS[x.dtype], ctypes.byref(product)
        functions.paged_mixed_products(x.data_ptr(), self.depth, rows, self.depth, element, one, 1, work.data_ptr())
        return to


class QuantisedLinear(NativeLinear):
    """A linear layer whose weights are codes."""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        super().__init__(weight.depth, weight.outs, bias)
        self.packed = PackedCodes(weight, coded_library().paged_columns())

    @property
    def weight(self) -> Tensor:
        """The weight, float32 [out_features, in_features], for callers that multiply by it themselves; a new copy each time."""
        return self.packed.weight.dequantised()

    def _multiplied(self, x: Tensor, rows: int | None) -> Tensor:
        return self.packed.multiply(x, self.bias, rows=rows)


class QuantisedEmbedding(nn.Module):
    """nn.Embedding, in this dtype, from the codes of the linear layer that it is tied to."""

    def __init__(self, packed: PackedCodes, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self._dtype = packed, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids: [...] → [..., width]."""
        flat, depth = ids.reshape(-1).tolist(), self.packed.depth
        found = torch.empty(len(flat), depth)
        for row, result in enumerate(flat):
            coded_library().paged_code_row(
                ctypes.byref(self.packed.c), self.packed.codes.data_ptr(), depth, result, found[row].data_ptr()
            )
        return found.to(self._dtype).view(*ids.shape, depth)


def replace_linears(module: nn.Module, make: Callable[[str, nn.Linear], QuantisedWeight | None]) -> None:
    """Replace linear layers by QuantisedLinear, one after the other, so that few weights are in memory twice.

    `make` gets a layer's name and the layer; it returns the weight, or None to leave the layer as it is. An embedding that is tied to a layer gets its
    codes. Raises BuildFailed, and what `make` raises.
    """
    coded_library()
    shared = {id(each.weight): (path, each) for path, each in module.named_modules() if type(each) is nn.Embedding}
    for name in [path for path, each in module.named_modules() if type(each) is nn.Linear]:
        # Found by name, since a list of layers would hold their floats.
        linear: Any = module.get_submodule(name)
        weight = make(name, linear)
        if weight is None:
            continue
        replaced = QuantisedLinear(weight, linear.bias)
        module.set_submodule(name, replaced)
        if id(linear.weight) in shared:
            path, embedding = shared[id(linear.weight)]
            module.set_submodule(path, QuantisedEmbedding(replaced.packed, embedding.weight.dtype))


def _held(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(on_large_pages(tensor), requires_grad=False)


def _filled(group_size: int) -> int:
    return -(-group_size // _FILL) * _FILL


def _packed_codes(weight: QuantisedWeight, columns: int) -> Tensor:
    """Return codes in panels, uint8 [panels, words, columns, 4]."""
    outs, groups, size = weight.outs, weight.depth // weight.group_size, weight.group_size
    filled, panels = _filled(size), -(-outs // columns)
    codes = nn.functional.pad(
        weight.codes.view(outs, groups, size), (0, filled - size, 0, 0, 0, panels * columns - outs)
    )
    if weight.bits == 8:
        words = codes.view(panels, columns, groups * filled // 4, 4)
    else:
        halves = codes.view(panels, columns, groups * filled // 8, 2, 4)
        words = halves[..., 0, :] | halves[..., 1, :] << 4
    return words.transpose(1, 2).contiguous()


def _panels(of_groups: Tensor, columns: int) -> Tensor:
    """Return [outs, groups] as panels, [panels, groups, columns], padded by 0."""
    outs, groups = of_groups.shape
    panels = -(-outs // columns)
    filled = nn.functional.pad(of_groups, (0, 0, 0, panels * columns - outs))
    return filled.view(panels, columns, groups).transpose(1, 2).contiguous()


def _check(functions: Any, bits: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    numbers, x = (
        torch.randn(rows, 2 * _TRIAL_GROUP, generator=drawn) for rows in (functions.paged_columns() + 7, _TRIAL_ROWS)
    )
    weight = quantise(numbers, bits=bits, group_size=_TRIAL_GROUP)
    packed = PackedCodes(weight, functions.paged_columns())
    alone = torch.cat([packed.multiply(x[i : i + 1], None, functions=functions) for i in range(len(x))])
    expected = x @ weight.dequantised().T
    # Rounding changes an input by half a step of its code at most.
    bound = x.abs().amax() / 254 * weight.dequantised().abs().sum(1) + 1e-3
    if not ((alone - expected).abs() <= bound).all():
        raise BuildFailed(f"products with codes of {bits} bits as this compiler made them are wrong.")
    for rows in range(2, len(x) + 1):
        if not torch.equal(packed.multiply(x[:rows], None, functions=functions), alone[:rows]):
            raise BuildFailed(
                f"products of {rows} rows with codes of {bits} bits as this compiler made them give other bits than row by row."
            )
