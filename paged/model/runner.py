"""One step through a model: its forward pass over paged memory, and the logits of the rows that sample.

In batch-invariant mode a sequence's logits do not depend, to the last bit, on the rest of the step, on how its prompt was cut, or on where its
blocks lie. There are three ways to run a step so:

    one call    decoders of Llama's family on the native backend: C sums in one order, whatever else is in the step (`native/fused.py`)
    tiles       all other models: tiles of 32 tokens, padded, so that torch always computes one shape, with the backend's invariant attention
    tokens      tiles of one token, where the places of a tile give different bits, or experts outside C group the rows that chose them

In packed mode all tokens of the step are one sequence of the forward pass: faster, and answers may differ.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paged.attention import (
    AttentionBackend,
    Expand,
    Latents,
    LayeredPool,
    LayerOptions,
    LayerShape,
    StepTokens,
    best_backend,
    get_backend,
    run_moves,
)
from paged.attention.backend import RenewsPlans
from paged.attention.kv_dtypes import AUTO
from paged.attention.latents import PIECE as LATENT_PIECE
from paged.attention.layouts.quantised import AnyEntries
from paged.block_manager import Moves
from paged.errors import UnsupportedModel
from paged.model.capacity import trial_memory, trial_step
from paged.model.captured import CapturedPasses, Pass
from paged.model.hook import under_way
from paged.model.loading import LoadedModel
from paged.model.native.experts import PackedExperts
from paged.model.native.fused import FusedDecoder, fused_decoder
from paged.model.native.packed import padded
from paged.model.states.layer import PassStates, RowStates
from paged.model.threads import THREADS, free_cores
from paged.model.tiling import Tiling

# Wide enough for every vector unit and matrix kernel that was tried; narrower tiles gave other bits at odd widths.
TILE = 32
# With fewer parameters a second thread saves little, and beside another busy process it makes each small product wait: with two threads
# on two cores, one of them busy, a product takes a hundred times as long.
_ONE_THREAD_BELOW = 10_000_000


class Read(NamedTuple):
    """Results of a forward pass: logits as `Runner.forward` returns them, those after `others`, float32 [k', vocabulary], and hidden states,
    float32 [k", hidden size]."""

    logits: Tensor
    others: Tensor
    states: Tensor


class _Seen(NamedTuple):
    """A pass as a group of layers sees it: its tokens, their slots, int64 [T] or [T, k], the backend's plan, and whether each token has a slot."""

    step: StepTokens
    slots: Tensor
    plan: Any
    is_whole: bool


class _Pass:
    """One forward pass, as ForwardPass: writes the step's K and V of a layer, then attends."""

    def __init__(
        self,
        runner: Runner,
        step: StepTokens,
        positions: Tensor,
        is_long: Tensor | None,
        states: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.positions = positions
        self.is_long = is_long
        self.states: RowStates | None = None
        if step.states is not None:
            is_invariant = runner.tile is not None
            self.states = PassStates(runner.pool, step, is_invariant=is_invariant, on_device=states)
        self._runner = runner
        self._step = step
        # What each group sees, made at its first use.
        self.groups: dict[int, _Seen] = {}
        self._latents: dict[int, Latents] = {}

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        options: LayerOptions,
        expand: Expand | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        pool, backend = self._runner.pool, self._runner.backend
        own = pool.layer(layer)
        step, slots, plan, is_whole = self._of_group(own.group)
        if not own.is_shared:
            # Padded places write nothing: the scratch block stays zero.
            pool.write_kv(layer, slots, keys[: step.num_tokens], values[: step.num_tokens], is_whole=is_whole)
        if expand is None and chosen is None:
            return backend.attend(queries, pool, layer, plan, options)
        if own.group not in self._latents:
            self._latents[own.group] = Latents(step, pool, backend, self._runner.expanded)
        return self._latents[own.group].attend(queries, own, options, expand, chosen)

    def shares(self) -> list[tuple[int, int]]:
        # Single tokens in batch-invariant mode: the bits of a product depend on the number of tokens.
        starts = self._step.query_start_loc.tolist()
        stops = starts if self._runner.tile is None else range(self._step.num_tokens + 1)
        return list(pairwise(stops))

    def of_share(self, first: int, stop: int) -> _Pass:
        its = copy(self)
        if its.states is not None:
            row = self._step.sequence_of(first)
            its.states = its.states.of_row(row, stop - first, has_begun=first > self._step.query_start_loc[row])
        return its

    def index(self, layer: int, first: int, keys: Tensor) -> Tensor:
        own = self._runner.pool.layer(layer)
        assert own.index is not None, "a layer that chooses has index keys"
        return self._kept(own.group, own.index, first, keys[:, None], None)[:, 0]

    def keep(self, layer: int, first: int, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        own = self._runner.pool.layer(layer)
        of_keys = self._kept(own.group, own.keys, first, keys, window)
        return of_keys, of_keys if own.values is own.keys else self._kept(own.group, own.values, first, values, window)

    def _kept(self, group: int, entries: AnyEntries, first: int, new: Tensor, window: int | None) -> Tensor:
        """Write entries of tokens of one sequence, [tokens, heads, size], from token `first` of the pass on. Return those of the sequence up to their end,
        without those before the window."""
        pool = self._runner.pool
        step, slots, _, is_whole = self._of_group(group)
        stop = first + len(new)
        pool.write(entries, slots[first:stop], new, is_whole=is_whole)
        sequence = step.sequence_of(first)
        gone = 0 if window is None else max(0, int(step.positions[first]) - window + 1)
        return pool.read(entries, step.slots_of(sequence, int(step.positions[stop - 1]) + 1, entries.part)[gone:])

    def keep_compressed(self, layer: int, first: int, name: str, begin: int, new: Tensor) -> Tensor:
        pool, step = self._runner.pool, self._step
        compressed = pool.layer(layer).compressed
        assert compressed is not None, "a layer that compresses has entries"
        assert step.tables is not None, "they lie in a group"
        (group, of_names), stop = compressed, begin + len(new)
        entries, tables = of_names[name], step.tables[group]
        assert tables is not None, "it is a group of blocks"
        sequence, size = step.sequence_of(first), entries.block_size
        slots = replace(step, block_tables=tables, block_size=size).slots_of(sequence, stop, entries.part)
        if step.written_from is not None:
            # Earlier entries are in place, perhaps in blocks that other rows share.
            there = step.written_from[group, sequence].item() // (pool.block_size // size)
            new, begin = new[max(0, there - begin) :], max(begin, min(there, stop))
        if len(new):
            pool.write(entries, torch.from_numpy(slots[begin:]).to(pool.device), new[:, None], is_whole=True)
        return pool.read(entries, slots)[:, 0]

    def _of_group(self, group: int) -> _Seen:
        if group not in self.groups:
            pool, step = self._runner.pool, self._step.of_group(group)
            slots, plan = step.slot_tensor(pool.device), self._runner.backend.prepare(step, pool)
            self.groups[group] = _Seen(step, slots, plan, is_whole=bool((step.slot_mapping >= 0).all()))
        return self.groups[group]

    def refuse(self, what: str, *, can_itself: bool = False) -> None:
        raise UnsupportedModel(f"a layer wants {what}, which no backend here does.")


class Runner:
    """Runs steps of a model on one pool. `runner_for` chooses the options.

    tile      places of a forward pass; None: one pass has all tokens of a step
    adapts    a pass has as many threads as there are free cores
    fused     the whole model as one call, attention included
    captures  tiles, or decodes, are CUDA graphs
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: LayeredPool,
        backend: AttentionBackend,
        tile: int | None,
        *,
        adapts: bool = False,
        fused: FusedDecoder | None = None,
        captures: bool = False,
    ) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self.tile = tile
        self._is_small = is_small(model)
        self._adapts = adapts and not self._is_small
        self._fused = fused
        self._captured: CapturedPasses | None = None
        renews = backend if isinstance(backend, RenewsPlans) else None
        if captures and (renews or not model.layers):
            groups = {pool.layer(each.layer).group for each in model.layers}
            self._captured = CapturedPasses(renews, pool, groups, tile)
        self._shares = any(each.source is not None for each in model.layers)
        # Memory for expanded latents, reused from pass to pass.
        self.expanded: dict[Any, LayeredPool] = {}

    @property
    def tiling(self) -> Tiling | None:
        """How the runner cuts a step, for cost models; None: it does not."""
        return None if self.tile is None else Tiling(places=self.tile, piece=self.backend.piece)

    def copy(self, moves: Moves) -> None:
        """Make a step's copies, kind by kind."""
        run_moves(self.pool, moves)

    def read(
        self,
        step: StepTokens,
        token_ids: NDArray[np.int32],
        is_sampled: NDArray[np.bool_],
        others: NDArray[np.bool_],
        stateful: NDArray[np.bool_],
        lengths: NDArray[np.int64] | None = None,
    ) -> Read:
        """Run the step as `forward` does. Return also the logits after the tokens `others`, and the hidden states of the tokens `stateful`, both
        bool [T]."""
        is_wanted = is_sampled | others
        logits, states = self._run(step, token_ids, is_wanted, stateful, lengths)
        ours, theirs = torch.from_numpy(is_sampled[is_wanted]), torch.from_numpy(others[is_wanted])
        return Read(logits[ours], logits[theirs], states)

    def forward(
        self,
        step: StepTokens,
        token_ids: NDArray[np.int32],
        is_sampled: NDArray[np.bool_],
        lengths: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Run the step. Return the logits after the tokens `is_sampled`, bool [T], as float32 [k, vocabulary].

        `lengths`, int64 [n]: the length of each row by which a rotary embedding chooses its frequencies (LongRoPE), the same in all steps of a
        sequence; None: `seq_lens` of this step.
        """
        return self._run(step, token_ids, is_sampled, np.zeros(step.num_tokens, np.bool_), lengths)[0]

    @torch.inference_mode()
    def _run(
        self,
        step: StepTokens,
        token_ids: NDArray[np.int32],
        is_sampled: NDArray[np.bool_],
        stateful: NDArray[np.bool_],
        lengths: NDArray[np.int64] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits after the tokens `is_sampled`, and hidden states of the tokens `stateful`."""
        if not step.num_tokens:
            # Such a step only delivers the outputs of requests that ended outside a step.
            return torch.empty(0, self.model.vocabulary_size), torch.empty(0, 0)
        with self.threads():
            if self._fused is not None:
                wanted = (is_sampled | stateful).nonzero()[0]
                states, logits = self._fused.forward(step, self.pool, token_ids, wanted)
                if len(wanted) == np.count_nonzero(is_sampled):
                    return logits, states[torch.from_numpy(stateful[wanted])]
                return logits[torch.from_numpy(is_sampled[wanted])], states[torch.from_numpy(stateful[wanted])]
            is_long = self._is_long(step, step.seq_lens if lengths is None else lengths)
            if self.tile is None:
                return self._forward_part(step, token_ids, is_sampled, stateful, is_long)
            parts, of_states = [], []
            for first in range(0, step.num_tokens, self.tile):
                stop = min(first + self.tile, step.num_tokens)
                part = step.part(first, stop, self.tile - (stop - first))
                places = slice(first, stop)
                its = self._forward_part(part, token_ids[places], is_sampled[places], stateful[places], is_long[places])
                parts.append(its[0])
                of_states.append(its[1])
            return torch.cat(parts), torch.cat([each for each in of_states if len(each)] or of_states[:1])

    def threads(self) -> AbstractContextManager[None]:
        """Return a context in which torch has the number of threads that a pass gets now."""
        count = 1 if self._is_small else free_cores().count() if self._adapts else None
        # One thread may be another caller's limit, which ends while this pass runs: then the pass needs its own.
        return nullcontext() if count is None or count >= torch.get_num_threads() > 1 else THREADS.at_most(count)

    def _forward_part(
        self,
        step: StepTokens,
        token_ids: NDArray[np.int32],
        is_sampled: NDArray[np.bool_],
        stateful: NDArray[np.bool_],
        is_long: NDArray[np.bool_],
    ) -> tuple[Tensor, Tensor]:
        device = self.model.device
        picked, of_states = is_sampled.nonzero()[0], stateful.nonzero()[0]
        if self._captured is not None and not len(of_states):
            found = self._captured.logits(self._replayed, step, token_ids)
            if found is not None:
                wanted = found if len(picked) == len(found) else found[torch.from_numpy(picked).to(device)]
                return wanted, found[:0]
        inputs, positions = self._padded(token_ids, step), self._padded(step.positions, step)
        keep: Any
        if self.tile is not None:
            # All places, or a single one whose logits are dropped: the product with the vocabulary has one of two shapes. Where layers share K
            # and V some modules drop places if this is a number, so it is an array.
            everything: Any = torch.arange(inputs.shape[1], device=device) if self._shares else 0
            keep = everything if len(picked) else torch.zeros(1, dtype=torch.int64, device=device)
        else:
            keep = torch.from_numpy(picked if len(picked) else np.zeros(1, np.int64)).to(device)
        more = {"output_hidden_states": True} if len(of_states) else {}
        long = self._padded(is_long, step).bool() if is_long.any() else None
        with under_way(_Pass(self, step, positions[0], long)), padded(inputs.shape[1], step.num_tokens):
            out: Any = self.model.module(
                input_ids=inputs, position_ids=positions, use_cache=False, logits_to_keep=keep, **more
            )
        logits: Tensor = out.logits[0]
        states = out.hidden_states[-1][0][torch.from_numpy(of_states).to(device)] if more else logits[:0]
        if not len(picked):
            return logits[:0].float(), states.float()
        if self.tile is not None or len(logits) > len(picked):
            # xLSTM's forward function returns logits of all places, whatever logits_to_keep is.
            logits = logits[torch.from_numpy(picked).to(device)]
        return logits.float(), states.float()

    def _replayed(self, given: Pass, inputs: Tensor, plans: dict[int, Any]) -> Tensor:
        """Run a pass, as captured.Forward. Each call makes its own slices of `inputs`, since the pool and the pass cache by the identity of a tensor."""
        step, at = given.step, 2
        states = None
        if step.states is not None:
            k = step.states[0].shape[1]
            states = inputs[at : at + k].T, inputs[at + k : at + 2 * k].T
            at += 2 * k
        its = _Pass(self, step, inputs[1], None, states)
        for group, seen in given.groups.items():
            k = seen.slot_mapping.size // seen.num_tokens
            its.groups[group] = _Seen(seen, inputs[at : at + k].T, plans[group], is_whole=True)
            at += k
        with under_way(its), padded(step.num_tokens, step.num_tokens):
            out: Any = self.model.module(input_ids=inputs[:1], position_ids=inputs[1:2], use_cache=False)
        logits: Tensor = out.logits[0]
        return logits

    def _is_long(self, step: StepTokens, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which tokens have the rotary embedding of long sequences, bool [T]."""
        limit = self.model.rotary_limit
        if limit is None:
            return np.zeros(step.num_tokens, np.bool_)
        is_long: NDArray[np.bool_] = (lengths > limit).repeat(np.diff(step.query_start_loc))
        return is_long

    def _padded(self, values: NDArray[Any], step: StepTokens) -> Tensor:
        """Return values of tokens, then zeros for padding, on the model's device, int64 [1, T + num_padded]."""
        padded = np.zeros(step.num_tokens + step.num_padded, np.int64)
        padded[: step.num_tokens] = values
        return torch.from_numpy(padded).unsqueeze(0).to(self.model.device)


def runner_for(
    model: LoadedModel,
    pool: LayeredPool,
    *,
    backend: str = "auto",
    batch_invariant: bool = True,
    enforce_eager: bool = False,
) -> Runner:
    """Return a runner with this backend, or with the best one: the whole model in one call where possible; else packed, or in tiles if
    `batch_invariant`. On a GPU tiles, and decodes of a packed model, are captured where possible, unless `enforce_eager`.

    Raises UnknownBackend or UnsupportedByBackend.
    """
    shapes = _shapes(model, pool)
    if backend == "auto":
        chosen = best_backend(shapes, invariant=batch_invariant)
    else:
        chosen = get_backend(backend, invariant=batch_invariant)
        for shape in shapes:
            chosen.check(shape)
    on_cpu = model.device.type == "cpu"
    if chosen.name == "native":
        fused = fused_decoder(model.module)
        if fused is not None and fused.fits(pool):
            return Runner(model, pool, chosen, None, adapts=True, fused=fused)
    captures = model.device.type == "cuda" and not enforce_eager and can_be_captured(model)
    if not batch_invariant:
        return Runner(model, pool, chosen, None, adapts=on_cpu, captures=captures)
    tried = chosen.name, torch.get_num_threads()
    if tried not in model.tiles:
        model.tiles[tried] = _tile_of(model, chosen)
    tile, adapts = model.tiles[tried]
    return Runner(model, pool, chosen, tile, adapts=adapts, captures=captures)


def can_be_captured(model: LoadedModel) -> bool:
    """Whether a pass of one shape launches the same kernels for every step: a backend does the attention of all layers, on K and V alone; no rotary
    embedding depends on lengths; and the host never reads how many rows chose an expert."""
    special = any(each.by_itself or each.expands or each.choosers for each in model.layers)
    special |= any(_groups_rows(each) and not _counts_on_device(each, model.dtype) for each in model.module.modules())
    return model.rotary_limit is None and not special


def _tile_of(model: LoadedModel, backend: AttentionBackend) -> tuple[int, bool]:
    """Try how many tokens a tile may have, and whether every number of threads gives the same bits. Return both."""
    forwards, backwards = _trial(model, backend, slice(None)), _trial(model, backend, slice(None, None, -1))
    groups_rows = any(map(_groups_rows, model.module.modules()))
    tile = TILE if torch.equal(forwards, backwards.flip(0)) and not groups_rows else 1
    # An answer must not depend on how busy the machine is.
    on_cpu = model.device.type == "cpu"
    return tile, on_cpu and not is_small(model) and _agrees_on_one_thread(model, backend, forwards)


def _shapes(model: LoadedModel, pool: LayeredPool) -> list[LayerShape]:
    """Return the shapes of attention that the backend has to do; none if no layer attends."""
    has_chunks = any(each.kind == "chunk" for each in model.layers)
    found: dict[LayerShape, None] = {}
    for each in model.layers:
        if each.by_itself:
            continue
        own, (heads, key_size, value_size) = pool.layer(each.layer), each.attended
        is_even = own.keys.part == own.values.part and own.keys.is_even(pool.block_size)
        # These attend in memory of the pass, in blocks of a piece; tokens that are chosen one by one, in blocks of one token.
        is_gathered, groups = each.expands or each.choosers > 0, max(1, each.choosers)
        shape = LayerShape(
            num_heads=each.num_heads // groups,
            num_kv_heads=max(1, heads // groups),
            head_dim=key_size,
            block_size=LATENT_PIECE if is_gathered else pool.block_size,
            dtype=model.dtype,
            device=model.device,
            has_soft_cap=model.has_soft_cap,
            has_sinks=model.has_sinks,
            has_chunks=has_chunks,
            value_dim=value_size,
            is_even=is_gathered or is_even,
            kv_dtype=AUTO if is_gathered else own.keys.kv_dtype,
        )
        found[shape] = None
        if each.choosers:
            found[replace(shape, block_size=1)] = None
    return list(found)


def _groups_rows(module: nn.Module) -> bool:
    """Whether a module is experts in torch, each of which gets the rows that chose it: the shapes of its products depend on the other tokens of a tile.
    Shared experts, and those whose only input is hidden states, get all rows."""
    name = type(module).__name__
    if isinstance(module, PackedExperts) or not name.endswith("Experts") or name.endswith("SharedExperts"):
        return False
    return len(inspect.signature(module.forward).parameters) > 1


def _counts_on_device(experts: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the sizes of the experts' groups of rows stay on the device, as with torch's grouped kernel for bfloat16."""
    chosen = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return dtype == torch.bfloat16 and chosen == "grouped_mm" and hasattr(experts, "is_transposed")


def is_small(model: LoadedModel) -> bool:
    """Whether the model is so small that one thread is enough."""
    return sum(each.numel() for each in model.module.parameters()) < _ONE_THREAD_BELOW


def _agrees_on_one_thread(model: LoadedModel, backend: AttentionBackend, logits: Tensor) -> bool:
    """Whether a trial on one thread gives these logits, to the last bit."""
    if torch.get_num_threads() == 1:
        return True
    with THREADS.at_most(1):
        return torch.equal(_trial(model, backend, slice(None)), logits)


def _trial(model: LoadedModel, backend: AttentionBackend, order: slice) -> Tensor:
    """Return logits of 32 sequences at their second token, one at each place of a tile, in this order; two steps of one token each."""
    pool, tables = trial_memory(model, TILE, 2)
    trial = Runner(model, pool, backend, TILE)
    ids = (np.arange(TILE, dtype=np.int32) * 7919 + 1) % model.vocabulary_size
    for position in range(2):
        step = trial_step(pool, np.full(TILE, position), np.arange(TILE + 1), np.full(TILE, position + 1), tables)
        logits = trial.forward(step, np.ascontiguousarray(ids[order]), np.ones(TILE, np.bool_))
    return logits
