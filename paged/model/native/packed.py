"""Linear layers whose weights are packed once, in the order in which the processor reads them, and held nowhere else.

A row's results do not depend on the other rows of the call (products.c). So padding of a pass is not computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paged.attention.native.backend import ELEMENTS, HEADERS
from paged.attention.native.build import library
from paged.errors import BuildFailed
from paged.model.native.large_pages import on_large_pages
from paged.model.threads import THREADS

_HERE = Path(__file__).parent
# Arguments of `library`: name, sources and headers.
MODEL_LIBRARY = (
    "model",
    tuple(_HERE / f"{each}.c" for each in ("products", "codes", "decoder", "experts", "recurrences")),
    (
        *(
            _HERE / f"{each}.h"
            for each in ("products", "panels", "codes", "decoder", "experts", "recurrences", "tiles")
        ),
        *HEADERS,
    ),
)
_pointer, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
# Rows of the trial of a product: more than two tiles of 6 or 16 rows.
_TRIAL_ROWS = 35
# Places of the pass under way, and its number of tokens; places after these are padding.
_PLACES: ContextVar[tuple[int, int]] = ContextVar("places", default=(0, 0))


@contextmanager
def padded(places: int, num_tokens: int) -> Iterator[None]:
    """Make packed layers inside give zeros for the places [1, places] after the first `num_tokens`, without computing them."""
    token = _PLACES.set((places, num_tokens))
    try:
        yield
    finally:
        _PLACES.reset(token)


def num_computed(rows: int) -> int:
    """Return how many of `rows` rows to compute: the tokens of the pass under way if the rows are its places, else all."""
    places, num_tokens = _PLACES.get()
    return num_tokens if rows == places else rows


class Product(ctypes.Structure):
    """paged_product of products.h."""

    _fields_ = (
        ("packed", _pointer),
        ("bias", _pointer),
        ("to", _pointer),
        ("outs", _int64),
        ("to_stride", _int64),
        ("adds", _int32),
        ("codes", _pointer),
    )


@cache
def model_library() -> Any:
    """Return the C functions. Raises BuildFailed, also if products as compiled depend on the number of rows."""
    found = library(*MODEL_LIBRARY)
    found.paged_products.argtypes = [_pointer, _int64, _int64, _int64, _int32, ctypes.POINTER(Product), _int64]
    found.paged_columns.restype = _int64
    found.paged_decoder_room.restype = found.paged_experts_room.restype = _int64
    # Beside busy cores hundreds of small products would each wait for a second thread.
    with THREADS.at_most(1):
        for dtype in ELEMENTS:
            _check_invariance(found, dtype)
    return found


def is_compiled() -> bool:
    """Whether the C functions can be used; compiles them at the first call."""
    try:
        model_library()
    except BuildFailed:
        return False
    return True


def pack(weight: Tensor, columns: int) -> Tensor:
    """Return weights [outs, depth] in panels of `columns` results: float32 [panels, depth, columns], bfloat16 [panels, depth / 2, columns, 2]."""
    return _in_panels(weight, columns).contiguous()


def _in_panels(weight: Tensor, columns: int) -> Tensor:
    """Return the same, as a view if panels are whole, so that the caller's copy of a large head is the only one."""
    outs, depth = weight.shape
    panels = -(-outs // columns)
    padded = weight if outs % columns == 0 else torch.nn.functional.pad(weight, (0, 0, 0, panels * columns - outs))
    if weight.dtype == torch.float32:
        return padded.reshape(panels, columns, depth).transpose(1, 2)
    return padded.reshape(panels, columns, depth // 2, 2).transpose(1, 2)


def multiply(
    x: Tensor, packed: Tensor, bias: Tensor | None, outs: int, *, functions: Any = None, rows: int | None = None
) -> Tensor:
    """Return x [n, depth], of the weights' dtype, times packed weights, plus a bias, float32 [outs]: float32 [n, outs]. With `rows` only the first rows are
    computed; others are 0."""
    x = x.contiguous()
    rows = len(x) if rows is None else rows
    to = torch.empty(len(x), outs)
    to[rows:] = 0
    product = Product(
        packed=packed.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        to=to.data_ptr(),
        outs=outs,
        to_stride=outs,
        adds=0,
    )
    functions = functions or model_library()
    depth = x.shape[1]
    functions.paged_products(x.data_ptr(), depth, rows, depth, ELEMENTS[x.dtype], ctypes.byref(product), 1)
    return to


class NativeLinear(nn.Module):
    """nn.Linear in C, for inference; a subclass holds the weights."""

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [..., in_features] → [..., out_features], of the dtype of x."""
        places, num_tokens = _PLACES.get()
        wanted = num_tokens if x.shape[:-1] == (1, places) else None
        out = self._multiplied(x.reshape(-1, self.in_features), wanted)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _multiplied(self, x: Tensor, rows: int | None) -> Tensor:
        """Multiply x [n, in_features], as `multiply` does: float32 [n, out_features]."""
        raise NotImplementedError


class PackedLinear(NativeLinear):
    """A NativeLinear whose weights are floats in panels."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias)
        columns = model_library().paged_columns()
        self.packed = nn.Parameter(on_large_pages(_in_panels(linear.weight.detach(), columns)), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The weight, [out_features, in_features], for callers that multiply by it themselves, as routers of experts do; a new copy each time."""
        packed = self.packed if self.packed.dim() == 4 else self.packed.unsqueeze(-1)
        return packed.permute(0, 2, 1, 3).reshape(-1, self.in_features)[: self.out_features]

    def _multiplied(self, x: Tensor, rows: int | None) -> Tensor:
        return multiply(x.to(self.packed.dtype), self.packed, self.bias, self.out_features, rows=rows)


class PackedEmbedding(nn.Module):
    """nn.Embedding from the packed weights of the linear layer that it is tied to."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        self.packed, self.width = linear.packed, linear.in_features

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids: [...] → [..., width]."""
        columns = self.packed.shape[2]
        found = self.packed[ids // columns, :, ids % columns]
        return found.reshape(*ids.shape, self.width)


def pack_linears(module: nn.Module) -> bool:
    """Pack the linear layers of a decoder on a CPU in place, one after the other, so that few weights are in memory twice. Layers of other dtypes stay.
    Return False, and change nothing, if C cannot be compiled here."""
    if not is_compiled():
        return False
    # Tied weights, by whose rows an embedding is replaced, too.
    shared = {id(each.weight): path for path, each in module.named_modules() if type(each) is nn.Embedding}
    for path in [path for path, each in module.named_modules() if type(each) is nn.Linear]:
        linear: Any = module.get_submodule(path)
        if not _can_be_packed(linear):
            continue
        packed = PackedLinear(linear)
        embedding = shared.get(id(linear.weight))
        module.set_submodule(path, packed)
        if embedding is not None:
            module.set_submodule(embedding, PackedEmbedding(packed))
    return True


def _can_be_packed(linear: nn.Linear) -> bool:
    weight = linear.weight
    # bfloat16 is packed in pairs.
    is_even = weight.dtype == torch.float32 or linear.in_features % 2 == 0
    return weight.device.type == "cpu" and weight.dtype in ELEMENTS and is_even


def _check_invariance(functions: Any, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randn(rows, 38, generator=drawn).to(dtype) for rows in (functions.paged_columns() + 7, _TRIAL_ROWS)
    )
    packed = pack(weight, functions.paged_columns())
    alone = torch.cat([multiply(x[i : i + 1], packed, None, len(weight), functions=functions) for i in range(len(x))])
    for rows in range(2, len(x) + 1):
        together = multiply(x[:rows], packed, None, len(weight), functions=functions)
        if not torch.equal(together, alone[:rows]):
            raise BuildFailed(
                f"products of {rows} rows in {dtype} as this compiler made them give other bits than row by row."
            )
