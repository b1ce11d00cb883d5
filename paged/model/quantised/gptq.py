"""GPTQ's tensors, as AutoGPTQ and GPTQModel write them.

qweight  int32 [depth × bits / 32, outs]     codes of consecutive inputs in a word, the first in the lowest bits
qzeros   int32 [groups, outs × bits / 32]    codes that mean 0, of consecutive results; in the first format 1 less, across the word
scales   float [groups, outs]
g_idx    int32 [depth]                       the group of each input, in any order with desc_act; codes stay in the order of inputs
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from paged.errors import UnsupportedModel
from paged.model.quantised.names import StoredCodes, listed_names, names_of
from paged.model.quantised.stored import FLOATS, Stored, group_size_of, groups_in_words, unpacked
from paged.model.quantised.weights import QuantisedWeight


class GPTQ:
    """GPTQ with the settings of a configuration."""

    marks = ("qweight", "qzeros")

    def __init__(self, settings: dict[str, Any]) -> None:
        self._bits = int(settings["bits"])
        self._group_size = group_size_of(settings.get("group_size", -1))
        version = str(getattr(settings.get("checkpoint_format"), "value", settings.get("checkpoint_format") or "gptq"))
        rules: dict[str, Any] = settings.get("dynamic") or {}
        if self._bits not in (4, 8):
            raise UnsupportedModel(f"its weights are quantised (gptq) in {self._bits} bits, which is not read.")
        if version not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(f"its weights are quantised (gptq) in the format {version!r}, which is not read.")
        if settings.get("pack_dtype", "int32") not in ("int32", torch.int32):
            raise UnsupportedModel(
                f"its weights are quantised (gptq) in words of {settings['pack_dtype']}, which is not read."
            )
        others = [rule for rule in rules if not rule.startswith("-")]
        if others:
            raise UnsupportedModel(
                f"its weights are quantised (gptq) otherwise where {others[0]!r} matches (`dynamic`), which is not read."
            )
        patterns = names_of([f"re:{rule.removeprefix('-:').removeprefix('-')}" for rule in rules])
        self._of_floats = [re.compile(each.removeprefix("re:")) for each in patterns]
        self._adds = 1 if version == "gptq" else 0
        self._only = listed_names(settings.get("modules_in_block_to_quantize"))
        self.bits = {self._bits}
        title = f"GPTQ, {self._bits} bits, {groups_in_words(self._group_size)}"
        self.codes = StoredCodes(
            title=title, bits=self._bits, group_size=self._group_size, zero_bits=self._bits, input_bytes=4
        )

    def names_floats(self, name: str) -> bool:
        if any(rule.match(name) for rule in self._of_floats):
            return True
        return bool(self._only) and not any(name.endswith(f".{each}") for each in self._only)

    def shape_of(self, layer: Stored) -> tuple[int, int]:
        words, outs = layer.header("qweight", ("I32",), 2).shape
        depth = words * 32 // self._bits
        size = layer.group_size(depth, self._group_size)
        if outs * self._bits % 32:
            raise layer.broken(f"its {outs:,} results do not fill words of 32 bits")
        layer.expect("scales", (depth // size, outs), FLOATS)
        layer.expect("qzeros", (depth // size, outs * self._bits // 32), ("I32",))
        if "g_idx" in layer:
            layer.expect("g_idx", (depth,), ("I32", "I64"))
        return outs, depth

    def check(self, layer: Stored) -> None:
        layer.scales("scales")
        self._order(layer, self.shape_of(layer)[1])

    def read(self, layer: Stored) -> QuantisedWeight:
        depth = self.shape_of(layer)[1]
        words, order = layer.read("qweight"), self._order(layer, depth)
        # Words hold consecutive inputs, which are rows of `words`.
        codes = unpacked(words.t(), self._bits)
        zeros = unpacked(_plus(layer.read("qzeros"), self._bits, self._adds), self._bits)
        return QuantisedWeight(
            codes=(codes if order is None else codes[:, order]).contiguous(),
            scales=layer.scales("scales").t().contiguous(),
            zeros=zeros.t().contiguous(),
            bits=self._bits,
            group_size=self._group_size or depth,
            order=order,
        )

    def _order(self, layer: Stored, depth: int) -> Tensor | None:
        # With one group g_idx may have any values.
        size = self._group_size or depth
        return None if size == depth else layer.order("g_idx", size)


def _plus(words: Tensor, bits: int, more: int) -> Tensor:
    """Add `more` to each code of a word, with carries between codes, since GPTQModel subtracts it from whole words."""
    return words + torch.tensor(sum(more << place for place in range(0, 32, bits)), dtype=torch.int32)
