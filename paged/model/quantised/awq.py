"""AWQ's tensors, as AutoAWQ writes them for its GEMM kernels.

qweight  int32 [depth, outs / 8]     codes of 8 results in a word, result i at place ORDER[i]
qzeros   int32 [groups, outs / 8]    the code that means 0, packed alike
scales   float [groups, outs]
"""

from __future__ import annotations

from typing import Any

from paged.errors import UnsupportedModel
from paged.model.quantised.names import StoredCodes, names_of
from paged.model.quantised.stored import FLOATS, Stored, group_size_of, groups_in_words, unpacked
from paged.model.quantised.weights import QuantisedWeight

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of a result in its word, counted from the lowest bits."""
BITS = 4


class AWQ:
    """AWQ with the settings of a configuration."""

    marks = ("qweight", "qzeros")

    def __init__(self, settings: dict[str, Any]) -> None:
        bits = int(settings.get("bits", settings.get("w_bit", BITS)))
        version = str(getattr(settings.get("version"), "value", settings.get("version") or "gemm")).lower()
        if bits != BITS:
            raise UnsupportedModel(f"its weights are quantised (awq) in {bits} bits, which is not read.")
        if version != "gemm":
            raise UnsupportedModel(f"its weights are quantised (awq) in the version {version!r}, which is not read.")
        self._group_size = group_size_of(settings.get("group_size", settings.get("q_group_size", 128)))
        self._floats = names_of(settings.get("modules_to_not_convert"))
        self.bits = {BITS}
        title = f"AWQ, {BITS} bits, {groups_in_words(self._group_size)}"
        self.codes = StoredCodes(title=title, bits=BITS, group_size=self._group_size, zero_bits=BITS)

    def names_floats(self, name: str) -> bool:
        return any(each in name for each in self._floats)

    def shape_of(self, layer: Stored) -> tuple[int, int]:
        depth, words = layer.header("qweight", ("I32",), 2).shape
        size = layer.group_size(depth, self._group_size)
        layer.expect("qzeros", (depth // size, words), ("I32",))
        layer.expect("scales", (depth // size, words * 8), FLOATS)
        return words * 8, depth

    def check(self, layer: Stored) -> None:
        layer.scales("scales")

    def read(self, layer: Stored) -> QuantisedWeight:
        codes = unpacked(layer.read("qweight"), BITS, ORDER)
        return QuantisedWeight(
            codes=codes.t().contiguous(),
            scales=layer.scales("scales").t().contiguous(),
            zeros=unpacked(layer.read("qzeros"), BITS, ORDER).t().contiguous(),
            bits=BITS,
            group_size=self._group_size or len(codes),
        )
