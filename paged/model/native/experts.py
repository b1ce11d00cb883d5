"""Mixtures of experts as one call into C for all rows and experts; weights are packed once and held nowhere else (experts.c).

transformers marks a module of experts (`use_experts_implementation`): its fields say how weights lie, and whether there are gates and biases. Its
activation is found by trials. A module is packed if a trial with two of its experts agrees. Any other stays in torch, where products group rows by
expert: a row's numbers depend on the others, and in batch-invariant mode `runner.py` runs token by token.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged.attention.native.backend import ELEMENTS
from paged.errors import UnsupportedModel
from paged.model.native.coded import PackedCodes, coded_library
from paged.model.native.large_pages import aligned
from paged.model.native.packed import Product, is_compiled, model_library, num_computed, pack
from paged.model.quantised.weights import QuantisedWeight

# Fields that transformers' decorator sets on a module.
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
# Rows and experts of a trial, and the largest difference, as a share of the largest result.
_TRIAL_ROWS, _TRIAL_EXPERTS = 5, 2
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
# Standard deviation of gates and ups in a trial: beyond most limits.
_SCALE = 8.0
Quantise = Callable[[Tensor], QuantisedWeight]
_pointer, _int32, _int64, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Activation(NamedTuple):
    """An expert's activation between its two products: paged_activation of experts.h. The defaults are SiLU."""

    slope: float = 1.0
    cubic: float = 0.0
    most_gate: float = math.inf
    most_up: float = math.inf
    plus: float = 0.0
    is_square: bool = False

    def of(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """Compute it in torch, from gates and ups of one shape; None: there are no ups."""
        if self.is_square:
            first = gate.clamp(min=0).square()
        else:
            gate = gate.clamp(max=self.most_gate)
            first = gate * (self.slope * (gate + self.cubic * gate**3)).sigmoid()
        return first if up is None else first * (up.clamp(-self.most_up, self.most_up) + self.plus)


_KNOWN = (
    Activation(),
    # GELU by tanh, which is a sigmoid of twice the argument.
    Activation(slope=2 * math.sqrt(2 / math.pi), cubic=0.044715),
    # GELU by a sigmoid.
    Activation(slope=1.702),
    Activation(is_square=True),
)


class _Activation(ctypes.Structure):
    _fields_ = (
        *((name, _float) for name in ("slope", "cubic", "most_gate", "most_up", "plus")),
        ("is_square", _int32),
    )


class _Call(ctypes.Structure):
    """paged_experts_call of experts.h."""

    _fields_ = (
        *(
            (name, _pointer)
            for name in ("x", "chosen", "shares", "out", "up", "down", "up_bias", "down_bias", "coded_up", "coded_down")
        ),
        ("work", _pointer),
        *((name, _int64) for name in ("rows", "choices", "experts", "hidden", "width")),
        ("element", _int32),
        ("has_gates", _int32),
        ("activation", _Activation),
    )


class _CodedWeights(nn.Module):
    """A weight of each expert in codes; `products` describes them for C."""

    def __init__(self, weights: Iterable[QuantisedWeight], biases: Tensor | None) -> None:
        super().__init__()
        columns = coded_library().paged_columns()
        packed = [PackedCodes(weight, columns) for weight in weights]
        self.each = nn.ModuleList(packed)
        self.products = (Product * len(packed))()
        for expert, its in enumerate(packed):
            bias = None if biases is None else biases[expert].data_ptr()
            codes, c = its.codes.data_ptr(), ctypes.addressof(its.c)
            self.products[expert] = Product(packed=codes, bias=bias, outs=its.outs, to_stride=its.outs, codes=c)


class PackedExperts(nn.Module):
    """A transformers module of experts with packed weights, for inference.

    Takes the weights out of that module, matrix after matrix; `quantise`, if given, makes each one codes. Each number is summed in one order, whatever
    other rows there are. If rows are the places of a pass, padding is not computed, and gives zeros.
    """

    def __init__(self, experts: Any, activation: Activation, quantise: Quantise | None = None) -> None:
        super().__init__()
        self.num_experts, self._activation = int(experts.down_proj.shape[0]), activation
        self._has_gates = bool(experts.has_gate)
        up = "gate_up_proj" if self._has_gates else "up_proj"
        is_mixed = self._has_gates and not experts.is_concatenated
        self.hidden_size, self.width = (
            experts.down_proj.shape[i] for i in ((2, 1) if experts.is_transposed else (1, 2))
        )
        self.up_bias = self.down_bias = None
        if experts.has_bias:
            self.up_bias, self.down_bias = (
                _biases(experts, f"{up}_bias", is_mixed),
                _biases(experts, "down_proj_bias", False),
            )
        self.up: nn.Parameter | _CodedWeights
        self.down: nn.Parameter | _CodedWeights
        if quantise is None:
            self.up, self.down = _packed(experts, up, is_mixed), _packed(experts, "down_proj", False)
        else:
            self.up = _CodedWeights(map(quantise, _matrices(experts, up, is_mixed)), self.up_bias)
            self.down = _CodedWeights(map(quantise, _matrices(experts, "down_proj", False)), self.down_bias)
        # Dtype of rows in products; None: codes take any of ELEMENTS.
        self._dtype = self.up.dtype if isinstance(self.up, Tensor) else None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run rows [..., hidden] through the experts that each chose, int64 [rows, k], with their shares [rows, k]. Return [..., hidden], of the rows' dtype.

        A choice that is the number of no expert adds nothing. Raises UnsupportedModel for shares of another shape than the choices.
        """
        rows = hidden_states.reshape(-1, self.hidden_size)
        rows = rows.to(self._dtype or (rows.dtype if rows.dtype in ELEMENTS else torch.float32)).contiguous()
        chosen = top_k_index.to(torch.int64).contiguous()
        shares = top_k_weights.float().contiguous()
        if chosen.shape != shares.shape or chosen.dim() != 2 or len(chosen) != len(rows):
            raise UnsupportedModel(
                f"experts {tuple(chosen.shape)} with shares {tuple(shares.shape)} for {len(rows)} rows; in C each row has as many shares as experts."
            )
        out, computed = torch.empty(rows.shape), num_computed(len(rows))
        out[computed:] = 0
        call = _Call(
            x=rows.data_ptr(),
            chosen=chosen.data_ptr(),
            shares=shares.data_ptr(),
            out=out.data_ptr(),
            **self._weights(),
            rows=computed,
            choices=chosen.shape[1],
            experts=self.num_experts,
            hidden=self.hidden_size,
            width=self.width,
            element=ELEMENTS[rows.dtype],
            has_gates=self._has_gates,
            activation=_Activation(*self._activation),
        )
        functions = model_library()
        work = aligned(functions.paged_experts_room(ctypes.byref(call)))
        call.work = work.data_ptr()
        functions.paged_experts(ctypes.byref(call))
        return out.to(hidden_states.dtype).view(hidden_states.shape)

    def _weights(self) -> dict[str, Any]:
        """Return a call's fields for weights and biases."""
        if isinstance(self.up, _CodedWeights) and isinstance(self.down, _CodedWeights):
            return {
                "coded_up": ctypes.addressof(self.up.products),
                "coded_down": ctypes.addressof(self.down.products),
            }
        there = {"up": self.up, "down": self.down, "up_bias": self.up_bias, "down_bias": self.down_bias}
        return {name: each.data_ptr() for name, each in there.items() if isinstance(each, Tensor)}


def pack_experts(module: nn.Module) -> None:
    """Pack the experts of a decoder on a CPU in place, layer by layer. Experts stay if they differ in a trial or have other dtypes, or if C cannot be
    compiled."""
    for path, each in list(module.named_modules()):
        if _can_be_packed(each):
            activation = _activation_of(each)
            if activation is not None and _agrees(each, activation, each.down_proj.dtype):
                module.set_submodule(path, PackedExperts(each, activation))


def code_experts(experts: Any, path: str, quantise: Quantise) -> PackedExperts:
    """Return a module of experts that `can_be_coded` with each weight [outs, depth] as codes, by `quantise`. Raises UnsupportedModel if a trial with two of
    them, in floats, differs."""
    activation = _activation_of(experts)
    if activation is None or not _agrees(experts, activation, torch.float32):
        raise UnsupportedModel(
            f"{path}: {type(experts).__name__} computes otherwise than C does, so that its experts cannot be codes."
        )
    return PackedExperts(experts, activation, quantise)


def can_be_coded(experts: Any) -> bool:
    """Whether C computes such experts, by the module's fields and activation. Works on the meta device; a trial, which needs weights, may still differ."""
    return _is_known(experts) and _activation_of(experts) is not None


def _is_known(experts: Any) -> bool:
    """Whether transformers marks it as experts of a form that C computes."""
    is_marked = all(hasattr(experts, mark) for mark in _MARKS) and not experts.has_post_expert_norm
    return is_marked and len(_weights_of(experts)) == 2


def _can_be_packed(experts: Any) -> bool:
    # bfloat16 is packed in pairs.
    return (
        is_compiled()
        and _is_known(experts)
        and all(
            each.device.type == "cpu"
            and each.dtype in ELEMENTS
            and (each.dtype == torch.float32 or not any(size % 2 for size in each.shape[1:]))
            for each in _weights_of(experts)
        )
    )


def _weights_of(experts: Any) -> list[Tensor]:
    return [each for each in experts.parameters() if each.dim() == 3]


@torch.no_grad()
def _activation_of(experts: Any) -> Activation | None:
    """Return the module's activation; None: it is not known here."""
    drawn = torch.Generator().manual_seed(0)
    gate, up = (
        torch.randn(64, experts.down_proj.shape[1 if experts.is_transposed else 2], generator=drawn) * _SCALE
        for _ in range(2)
    )
    if not experts.has_gate:
        return next(
            (each for each in _KNOWN if torch.allclose(experts.act_fn(gate), each.of(gate, None), 1e-3, 1e-5)), None
        )
    both = torch.cat([gate, up], -1) if experts.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
    found = experts._apply_gate(both)
    limit, slope = (
        next((float(getattr(experts, name)) for name in names if getattr(experts, name, None) is not None), None)
        for names in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha"))
    )
    limited = [] if limit is None else [each._replace(most_gate=limit, most_up=limit) for each in _KNOWN]
    if limit is not None and slope is not None:
        limited.insert(0, Activation(slope=slope, most_gate=limit, most_up=limit, plus=1.0))
    # With limits first: a limit that is too large for the trial to reach has to be kept.
    return next((each for each in (*limited, *_KNOWN) if torch.allclose(found, each.of(gate, up), 1e-3, 1e-5)), None)


@torch.no_grad()
def _agrees(experts: Any, activation: Activation, dtype: torch.dtype) -> bool:
    """Whether two of the experts, packed in this dtype, agree with the module."""
    few = copy.copy(experts)
    few._parameters = {
        name: nn.Parameter(each[:_TRIAL_EXPERTS].to(dtype, copy=True)) for name, each in experts.named_parameters()
    }
    few.num_experts = count = len(few.down_proj)
    # "eager", since transformers' grouped products refuse some widths.
    few.config = copy.copy(experts.config)
    few.config._experts_implementation = "eager"
    drawn = torch.Generator().manual_seed(0)
    hidden_size = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x = torch.randn(_TRIAL_ROWS, hidden_size, generator=drawn).to(dtype)
    chosen = torch.stack([torch.arange(_TRIAL_ROWS) % count, (torch.arange(_TRIAL_ROWS) + 1) % count], -1)[:, :count]
    shares = torch.rand(chosen.shape, generator=drawn).to(x.dtype)
    expected = few(x, chosen, shares).float()
    found = PackedExperts(few, activation)(x, chosen, shares).float()
    return bool((found - expected).abs().max() <= _BOUNDS[x.dtype] * expected.abs().max())


def _gates_first(weight: Tensor, is_mixed: bool) -> Tensor:
    """Return a weight, or a bias, with all gates before all ups."""
    return torch.cat([weight[::2], weight[1::2]]) if is_mixed else weight


def _matrices(experts: Any, name: str, is_mixed: bool) -> Iterator[Tensor]:
    """Take the weights of this name out of the module, and yield each expert's, [outs, depth]."""
    weights = getattr(experts, name).detach()
    delattr(experts, name)
    for weight in weights:
        yield _gates_first(weight.t() if experts.is_transposed else weight, is_mixed).contiguous()


def _packed(experts: Any, name: str, is_mixed: bool) -> nn.Parameter:
    columns, count = model_library().paged_columns(), len(getattr(experts, name))
    found = torch.empty(0)
    for number, weight in enumerate(_matrices(experts, name, is_mixed)):
        its = pack(weight, columns)
        if not number:
            found = torch.empty(count, *its.shape, dtype=its.dtype)
        found[number] = its
    return nn.Parameter(found, requires_grad=False)


def _biases(experts: Any, name: str, is_mixed: bool) -> nn.Parameter:
    return nn.Parameter(
        torch.stack([_gates_first(each, is_mixed) for each in getattr(experts, name).detach().float()]),
        requires_grad=False,
    )
