"""Memory for what a model's layers keep: pages of equal bytes, and K and V of each attention layer as views of them.

If all layers keep all tokens, a page is a block, with K and V of every layer side by side:

    page   | K of 0 | V of 0 | K of 1 | V of 1 | ...        each [block_size, num_kv_heads, head_dim]

For any other model a plan says where each layer lies (`LayeredPool`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged.base.words import shown
from paged.errors import InvalidPool

from .kv_dtypes import AUTO, KV_DTYPES, block_bytes
from .layouts.entries import Entries, Steps
from .layouts.quantised import AnyEntries, QuantisedEntries
from .layouts.state import State, StatePlace
from .pages import Pages, check_sizes

_MOST_MAPPED = 4  # slot mappings whose rows are kept


class EntryPlace(NamedTuple):
    """Where one piece of a layer's entries lies: on page `part` of a block, from byte `offset` on. An entry is [heads,
    size], is stored as `kv_dtype` says (kv_dtypes.py), and stands for `stride` tokens."""

    part: int
    offset: int
    heads: int
    size: int
    kv_dtype: str = AUTO
    stride: int = 1


@dataclass(frozen=True, slots=True)
class KVPlace:
    """Where K and V of a layer lie. `group`: the layer group whose tables it uses. `is_shared`: an earlier layer writes
    them. `index`: its index keys, if any. `compressed`: the group of its compressed entries, and these by name."""

    group: int
    keys: EntryPlace
    values: EntryPlace
    is_shared: bool = False
    index: EntryPlace | None = None
    compressed: tuple[int, dict[str, EntryPlace]] | None = None


@dataclass(frozen=True, slots=True)
class LayerKV:
    """K and V of a layer as views, at the places of a KVPlace; one view for both where V is K."""

    group: int
    keys: AnyEntries
    values: AnyEntries
    is_shared: bool = False
    index: AnyEntries | None = None
    compressed: tuple[int, dict[str, AnyEntries]] | None = None


class LayeredPool:
    """Device and host memory of `num_blocks` and `num_host_blocks` pages, with K and V of attention layers as views.

    layers      where each layer lies, by number; one that reads an earlier layer's K and V has that layer's place
    block_size  tokens of a block, in every group
    states      where the pieces of each state layer lie
    state_group  the group of the states; None: there are none
    Raises as Pages, and InvalidPool for such a block size.
    """

    def __init__(
        self,
        layers: Mapping[int, KVPlace],
        *,
        num_blocks: int,
        page_bytes: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
        states: Sequence[Sequence[StatePlace]] = (),
        state_group: int | None = None,
    ) -> None:
        check_sizes(1, block_size=block_size)
        self.pages = Pages(num_pages=num_blocks, page_bytes=page_bytes, device=device, num_host_pages=num_host_blocks)
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = self.pages.device
        # The latest slot mappings, one for each layer group in a pass, and the rows that came of them.
        self._mapped: list[tuple[Tensor, dict[tuple[int, Steps], tuple[Tensor, Tensor | None]]]] = []
        self._places = dict(layers)
        self._layers = {layer: self._layer_of(place) for layer, place in layers.items()}
        self.state_group = state_group
        self.states = [[State(self.pages, *each) for each in pieces] for pieces in states]

    def _layer_of(self, place: KVPlace) -> LayerKV:
        keys = self._entries(place.keys)
        values = keys if place.values == place.keys else self._entries(place.values)
        index = None if place.index is None else self._entries(place.index)
        compressed = None
        if place.compressed is not None:
            group, named = place.compressed
            compressed = group, {name: self._entries(each) for name, each in named.items()}
        return LayerKV(place.group, keys, values, place.is_shared, index, compressed)

    def _entries(self, place: EntryPlace) -> AnyEntries:
        shape = {name: getattr(place, name) for name in ("part", "offset", "heads", "size")}
        shape["block_size"] = self.block_size // place.stride
        if place.kv_dtype == AUTO:
            return Entries(self.pages, **shape, dtype=self.dtype)
        return QuantisedEntries(self.pages, **shape, kv_dtype=place.kv_dtype)

    @property
    def scratch_block(self) -> int:
        """The page that padding points to; it is all zero, and never written."""
        return self.num_blocks

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's K and V in the layer that has the most, if stored in the pool's dtype."""
        sizes = (its.keys.heads * its.keys.size + its.values.heads * its.values.size for its in self._layers.values())
        return max(sizes, default=0) * self.dtype.itemsize

    @property
    def kv_dtype(self) -> str:
        """The KV dtype of the layers that are quantised; AUTO if none is."""
        found = {each.keys.kv_dtype for each in self._layers.values()} - {AUTO}
        return found.pop() if found else AUTO

    @property
    def is_side_by_side(self) -> bool:
        """Whether a block is one page, and on it K and V of all layers lie one after the other and alike."""
        if self.states or not self._places:
            return False
        first = next(iter(self._places.values())).keys
        unit = block_bytes(first.kv_dtype, self.block_size, first.heads, first.size, self.dtype.itemsize)

        def unit_at(number: int) -> EntryPlace:
            return first._replace(part=0, offset=unit * number)

        return self._places == {
            layer: KVPlace(0, unit_at(2 * layer), unit_at(2 * layer + 1)) for layer in range(len(self._places))
        }

    def layer(self, layer: int) -> LayerKV:
        """Return where K and V of a layer lie, as views."""
        return self._layers[layer]

    def keys(self, layer: int) -> Tensor:
        """Return K of a layer by page, [num_blocks + 1, block_size, kv heads, size]; a float32 copy if it is quantised."""
        return _numbers(self._layers[layer].keys)

    def values(self, layer: int) -> Tensor:
        """Return V of a layer, as `keys`."""
        return _numbers(self._layers[layer].values)

    def write_kv(
        self, layer: int, slot_mapping: Tensor, keys: Tensor, values: Tensor, *, is_whole: bool = False
    ) -> None:
        """Write K and V, each [T, kv heads, size], to these distinct slots: int64 [T], or [T, k] if a block has k
        pages. In [T, k] a slot of -1 is skipped; `is_whole` promises that there is none, which saves a read from the
        device."""
        own = self._layers[layer]
        self.write(own.keys, slot_mapping, keys, is_whole=is_whole)
        self.write(own.values, slot_mapping, values, is_whole=is_whole)

    def write(self, entries: AnyEntries, slot_mapping: Tensor, new: Tensor, *, is_whole: bool = False) -> None:
        """Write one piece of a layer's entries, [T, heads, size], as `write_kv`; slots count entries, not tokens."""
        for piece, its in zip(entries.stored, entries.encoded(new), strict=True):
            rows, kept = self._rows_of(slot_mapping, piece, is_whole)
            piece.tokens.index_copy_(0, rows, its if kept is None else its[kept])

    def read(self, entries: AnyEntries, slots: NDArray[np.int64]) -> Tensor:
        """Return one piece of a layer's entries at these slots, int64 [n]: [n, heads, size] in the pool's dtype."""
        rows = [torch.from_numpy(each.token_steps.of(slots, each.block_size)) for each in entries.stored]
        stored = [
            each.tokens.index_select(0, of.to(self.device)) for each, of in zip(entries.stored, rows, strict=True)
        ]
        return entries.transformed(entries.decoded(*stored)).to(self.dtype)

    def _rows_of(self, slot_mapping: Tensor, entries: Entries, is_whole: bool) -> tuple[Tensor, Tensor | None]:
        """Return the rows of `entries.tokens` to write, and the tokens to put there (None: all); kept by slot
        mapping."""
        found = next((found for slots, found in self._mapped if slots is slot_mapping), None)
        if found is None:
            found = {}
            self._mapped = [(slot_mapping, found), *self._mapped[: _MOST_MAPPED - 1]]
        key = (entries.part, entries.token_steps)
        if key not in found:
            slots, kept = slot_mapping, None
            if slots.ndim == 2:
                slots = slots[:, entries.part]
                if not is_whole:
                    kept = (slots >= 0).nonzero()[:, 0]
                    slots = slots[kept]
            found[key] = entries.token_steps.of(slots, entries.block_size), kept
        return found[key]

    def written(self, slot_mapping: Tensor) -> None:
        """Note that other code writes K and V of all layers to these distinct slots, int64 [T]. This does nothing; a
        pool that keeps account of writes overrides it."""

    def poison(self, blocks: Tensor) -> None:
        """Fill device blocks, int64 [n], with NaN, so that a read of freed blocks shows."""
        self.pages.poison(blocks)

    def device_to_host(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy device blocks to host blocks, both int64 [n]."""
        self.pages.device_to_host(sources, destinations)

    def host_to_device(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy host blocks to device blocks, both int64 [n]."""
        self.pages.host_to_device(sources, destinations)

    def device_to_device(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy device blocks to other device blocks, both int64 [n]."""
        self.pages.device_to_device(sources, destinations)


class KVPool(LayeredPool):
    """Memory of a model whose layers are all alike and keep all tokens: `num_blocks` blocks, and `num_host_blocks`.

    `value_dim`: the size of a head of V, None: as of K. `kv_dtype`: see kv_dtypes.py. Raises as LayeredPool does, and
    InvalidPool for an unknown `kv_dtype`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_dtype: str = AUTO,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        check_sizes(
            1,
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
        )
        if kv_dtype not in KV_DTYPES:
            raise InvalidPool(f'kv_dtype is "{kv_dtype}"; known are {", ".join(KV_DTYPES)}.')
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InvalidPool(f"dtype has to be one of torch's floats; got {shown(dtype)}.")
        self.num_layers = num_layers
        keys, values = (
            block_bytes(kv_dtype, block_size, num_kv_heads, size, dtype.itemsize) for size in (head_dim, value_dim)
        )
        both = keys + values
        super().__init__(
            {
                layer: KVPlace(
                    0,
                    EntryPlace(0, both * layer, num_kv_heads, head_dim, kv_dtype),
                    EntryPlace(0, both * layer + keys, num_kv_heads, value_dim, kv_dtype),
                )
                for layer in range(num_layers)
            },
            num_blocks=num_blocks,
            page_bytes=num_layers * both,
            block_size=block_size,
            dtype=dtype,
            device=device,
            num_host_blocks=num_host_blocks,
        )

    @staticmethod
    def bytes_per_block(
        *,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype,
        kv_dtype: str = AUTO,
    ) -> int:
        """Return the bytes of one block's K and V over all layers."""
        sizes = (head_dim, head_dim if value_dim is None else value_dim)
        return num_layers * sum(block_bytes(kv_dtype, block_size, num_kv_heads, size, dtype.itemsize) for size in sizes)


def _numbers(entries: AnyEntries) -> Tensor:
    return entries.transformed(entries.decoded(*(each.blocks for each in entries.stored)))
