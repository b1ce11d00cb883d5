"""Layers of several kinds on pages of one size: which layers share a block table, how large a page is, what a sequence holds.

    tokens      0        16       32       48       64
    full        | p3 p9  | p1 p7  | p4 p5  | p0 p2  |         2 pages a block
    window 32   |        |        | p6     | p12    |         1 page a block; blocks before the window were released
    state                                      p8 p10 p11     3 pages in all

A *unit* is what a kernel reads whole: one layer's K of a block, its V, or one piece of a layer's state. A unit lies within one page. So any page
size that holds the largest unit works, and blocks stay small however large a state is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from paged.errors import InvalidConfig, NoPagePlan

LENGTHS = tuple(1024 * 2**power for power in range(8))
"""Lengths of a sequence, 1k, 2k, 4k to 128k tokens, at which a plan is judged."""
BLOCK_SIZES = (16, 32)
MOST_WASTE = 1.03
"""Most bytes held over bytes kept with which the smaller block is chosen."""
MOST_PAGES = 16
"""Most pages of a block, over all groups, with which the smaller block is chosen: each page is one more id to write when a row grows."""
_ALIGNED = 64
_MIXTURES = 256
"""Most ways to fill a page that are compared: 16 numbers of units for each size but the smallest, or fewer if there are more than three sizes."""
_MOST_PARTS = 64
"""Most units of a page, and pages of a block, for which page sizes are tried."""
_LARGEST_PAGE = 8 << 20
_EQUAL = 0.005
"""Of the plans within this of the least waste, the one with the fewest pages a token is chosen."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of one layer's state: `units` pieces of `unit_bytes` each, such as one a head, each of which a kernel reads whole."""

    units: int
    unit_bytes: int


class Layers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal layers of a model, and what they keep of a sequence.

    kind    full: all tokens; window: the last `reach`, the newest included; chunk: those since the last multiple of `reach`;
            state: a value of fixed size
    count   number of layers
    entry   attention: bytes of each piece that one layer stores of one entry: its K and its V, or a latent, an index key and so on
    stride  attention: tokens of one entry
    reach   window or chunk: its length in tokens
    parts   state: what one layer keeps
    """

    kind: Literal["full", "window", "chunk", "state"]
    count: int
    entry: tuple[int, ...] = ()
    stride: int = 1
    reach: int = 0
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        is_state, is_bounded = self.kind == "state", self.kind in ("window", "chunk")
        for name, value, least in (
            ("count", self.count, 1),
            *(("entry", piece, 1) for piece in self.entry),
            ("stride", self.stride, 1),
            ("reach", self.reach, 1 if is_bounded else 0),
            *((f"parts: {field}", getattr(part, field), 1) for part in self.parts for field in part.__struct_fields__),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidConfig(
                    f"{self.kind} layers: {name} is {value!r}; it has to be a whole number of at least {least}"
                )
        if is_state != bool(self.parts) or is_state == bool(self.entry):
            raise InvalidConfig(
                f"{self.kind} layers: states have parts, and all others an entry; got entry {self.entry}, parts {self.parts}"
            )
        if self.reach and not is_bounded:
            raise InvalidConfig(f"{self.kind} layers: reach is {self.reach}; only windows and chunks have one")

    def units(self, block_tokens: int) -> list[tuple[int, int]]:
        """Return (bytes, number) of the units of a block of `block_tokens` tokens, over all layers; for a state, of the whole state."""
        if self.kind == "state":
            return [(part.unit_bytes, part.units * self.count) for part in self.parts]
        return [(piece * block_tokens // self.stride, self.count) for piece in self.entry]

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's state; 0 for attention."""
        return sum(part.units * part.unit_bytes for part in self.parts)

    def kept_bytes(self, num_tokens: int) -> int:
        """Return the bytes that these layers must keep of a sequence of `num_tokens` tokens; of entries of several tokens only whole ones count."""
        if self.kind == "state":
            return self.count * self.state_bytes
        first = front(self.kind, self.reach, num_tokens) // self.stride
        return self.count * sum(self.entry) * max(0, num_tokens // self.stride - first)


def front(kind: str, reach: int, num_tokens: int) -> int:
    """Return the first token that a layer of this kind keeps of a sequence of `num_tokens` computed tokens."""
    if kind == "window":
        # The next token sees itself and the reach - 1 tokens before it.
        return max(0, num_tokens + 1 - reach)
    return num_tokens // reach * reach if kind == "chunk" else 0


def blocks_held(kind: str, reach: int, num_tokens: int, block_tokens: int) -> int:
    """Return the blocks that a sequence of `num_tokens` computed tokens holds in a group of attention layers of this `kind` and `reach`."""
    return max(0, -(-num_tokens // block_tokens) - front(kind, reach, num_tokens) // block_tokens)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep the same tokens for the same time, and so share a block table.

    kind, reach   those of its layers
    layers        its layers, by shape
    block_tokens  tokens of a block; 0 for a state
    pages         pages of a block, or of a state
    used_bytes    bytes of these pages that units fill
    """

    kind: Literal["full", "window", "chunk", "state"]
    reach: int
    layers: tuple[Layers, ...]
    block_tokens: int
    pages: int
    used_bytes: int

    @property
    def num_layers(self) -> int:
        return sum(each.count for each in self.layers)

    @property
    def name(self) -> str:
        """The kind, its reach if it has one, and the tokens of an entry if there are several."""
        strides = sorted({each.stride for each in self.layers})
        named = f"{self.kind} {self.reach:,}" if self.reach else self.kind
        return f"{named}, {' and '.join(map(str, strides))} tokens an entry" if strides[-1] > 1 else named

    def pages_held(self, num_tokens: int) -> int:
        """Return the pages that a row of `num_tokens` computed tokens holds."""
        if self.kind == "state":
            return self.pages
        return blocks_held(self.kind, self.reach, num_tokens, self.block_tokens) * self.pages


class LayerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of `page_bytes`, blocks of `block_size` tokens, and the groups of layers."""

    page_bytes: int
    block_size: int
    groups: tuple[Group, ...]

    def held_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the pages that a sequence of `num_tokens` tokens holds."""
        return self.page_bytes * sum(group.pages_held(num_tokens) for group in self.groups)

    def kept_bytes(self, num_tokens: int) -> int:
        """Return the bytes that the layers must keep of a sequence of `num_tokens` tokens."""
        return sum(layers.kept_bytes(num_tokens) for group in self.groups for layers in group.layers)

    def bytes_if_full(self, num_tokens: int) -> int:
        """Return the bytes that the same layers would keep if windows and chunks kept all tokens."""
        layers = [each for group in self.groups for each in group.layers]
        full = [msgspec.structs.replace(each, kind="full", reach=0) if each.reach else each for each in layers]
        return sum(each.kept_bytes(num_tokens) for each in full)

    @property
    def waste(self) -> float:
        """Bytes held over bytes kept, at the worst of LENGTHS."""
        # A chunk keeps no token at its end.
        return max(self.held_bytes(length) / max(1, self.kept_bytes(length)) for length in LENGTHS)

    @property
    def pages_of_block(self) -> int:
        """Pages of one block of every group but that of states."""
        return sum(group.pages for group in self.groups if group.block_tokens)


def plan_layers(layers: Sequence[Layers], *, block_size: int | None = None, page_bytes: int | None = None) -> LayerPlan:
    """Plan groups and pages for a model's layers, with the least waste, then the fewest pages a token.

    Blocks have 16 tokens, or 32 if 16 would waste more or take many pages. `block_size` and `page_bytes`, if given, are used as they are. A group with
    entries of several tokens has blocks of the least common multiple of `block_size` and an entry. Raises InvalidConfig for no layers or a size
    below 1, and NoPagePlan for pages smaller than a unit.
    """
    if not layers:
        raise InvalidConfig("a plan needs layers; got none")
    for name, value in (("block_size", block_size), ("page_bytes", page_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidConfig(f"{name} is {value!r}; it has to be a whole number of at least 1")
    sizes = BLOCK_SIZES if block_size is None else (block_size,)
    plans: list[LayerPlan] = []
    for size in sizes:
        plan = _best(_plans(layers, size, page_bytes))
        if plan.waste <= MOST_WASTE and plan.pages_of_block <= MOST_PAGES:
            return plan
        plans.append(plan)
    return _best(plans)


def _best(plans: Iterable[LayerPlan]) -> LayerPlan:
    wastes = [(plan.waste, plan) for plan in plans]
    least = min(waste for waste, _ in wastes)
    close = [(plan.pages_of_block / plan.block_size, waste, plan) for waste, plan in wastes if waste <= least + _EQUAL]
    return min(close, key=lambda each: (*each[:2], each[2].page_bytes))[2]


def _plans(layers: Sequence[Layers], block_size: int, page_bytes: int | None) -> Iterator[LayerPlan]:
    """Yield the plans with blocks of `block_size` tokens: one for each candidate page size, or for `page_bytes`."""
    kinds: dict[tuple[str, int, int], list[Layers]] = {}
    for each in layers:
        tokens = 0 if each.kind == "state" else math.lcm(block_size, each.stride)
        kinds.setdefault((each.kind, each.reach, tokens), []).append(each)
    units = {
        key: merged_units(unit for each in of_kind for unit in each.units(key[2])) for key, of_kind in kinds.items()
    }
    largest = max(size for of_group in units.values() for size, _ in of_group)
    if page_bytes is not None and page_bytes < largest:
        raise NoPagePlan(page_bytes, largest, block_size)
    for size in _candidates(units.values(), largest) if page_bytes is None else [page_bytes]:
        yield _planned(kinds, units, size, block_size)


def merged_units(units: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (bytes, number) of units, the largest first, each size once."""
    counts = Counter[int]()
    for size, number in units:
        counts[size] += number
    return sorted(counts.items(), reverse=True)


def _candidates(groups: Iterable[list[tuple[int, int]]], largest: int) -> list[int]:
    """Return page sizes to try: multiples of a group's units, and even parts of a group's block."""
    found = set[int]()
    for units in groups:
        whole = sum(size * number for size, number in units)
        found |= {size * times for size, number in units for times in range(1, min(number, _MOST_PARTS) + 1)}
        found |= {-(-whole // pages) for pages in range(1, _MOST_PARTS + 1)}
    aligned = {-(-size // _ALIGNED) * _ALIGNED for size in (*found, largest)}
    return sorted(size for size in aligned if largest <= size <= max(largest + _ALIGNED, _LARGEST_PAGE))


def _planned(
    kinds: dict[tuple[str, int, int], list[Layers]],
    units: dict[tuple[str, int, int], list[tuple[int, int]]],
    page_bytes: int,
    block_size: int,
) -> LayerPlan:
    groups = [
        Group(
            kind=of_kind[0].kind,
            reach=key[1],
            layers=tuple(of_kind),
            block_tokens=key[2],
            pages=sum(times for _, times in packing(units[key], page_bytes)),
            used_bytes=sum(size * number for size, number in units[key]),
        )
        for key, of_kind in kinds.items()
    ]
    return LayerPlan(page_bytes=page_bytes, block_size=block_size, groups=tuple(groups))


def packing(units: Sequence[tuple[int, int]], page_bytes: int) -> list[tuple[tuple[int, ...], int]]:
    """Return how pages hold these units, (bytes, number), the largest first: (units of each size on a page, pages filled like that).

    The packing is greedy, and not always the smallest: each page gets the fullest mixture, of equal ones the one closest to the mixture of what is left.
    """
    left = [number for _, number in units]
    sizes = [size for size, _ in units]
    width = max(1, int(_MIXTURES ** (1 / max(2, len(sizes) - 1))))
    packed: list[tuple[tuple[int, ...], int]] = []
    while any(left):
        mixture = max(_mixtures(sizes, left, page_bytes, width), key=lambda mixture: _rank(mixture, sizes, left))
        times = min(has // takes for has, takes in zip(left, mixture, strict=True) if takes)
        left = [has - takes * times for has, takes in zip(left, mixture, strict=True)]
        packed.append((mixture, times))
    return packed


def _mixtures(sizes: Sequence[int], left: Sequence[int], room: int, width: int) -> Iterator[tuple[int, ...]]:
    """Yield mixtures for one page, as numbers of units of each size, with up to `width` numbers for each size but the smallest, which fills the rest."""
    if len(sizes) == 1:
        yield (min(left[0], room // sizes[0]),)
        return
    most = min(left[0], room // sizes[0])
    # Fewer large units leave room for small ones; beyond `width` that gains too little for the search.
    for taken in range(most, max(-1, most - width), -1):
        for rest in _mixtures(sizes[1:], left[1:], room - taken * sizes[0], width):
            yield (taken, *rest)


def _rank(mixture: Sequence[int], sizes: Sequence[int], left: Sequence[int]) -> tuple[int, float]:
    filled = sum(taken * size for taken, size in zip(mixture, sizes, strict=True))
    shares = [taken / has for taken, has in zip(mixture, left, strict=True) if has]
    return filled, min(shares) - max(shares)
