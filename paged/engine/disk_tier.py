"""A tier below memory: full blocks of the prefix cache are written to a store, and are read back before a prompt is
computed.

    add       keys of the prompt
    admitted  what memory has not is looked up ──> loads
    a batch   ran ──> blocks that it filled: copied, and written by the store's thread
              ended, and lists loads ──> pieces are read by the reader's thread ──> copied in between steps ──> loaded

A block is written when it is full; if it were written when it is evicted, a kill would lose the newest content. A step
copies, and waits for no disk. Blocks that are missing, late or corrupt are computed.

With layers of several kinds a block of the store is a column: the block of each group that has blocks. States have a
store of their own, with what stands at the end of a prompt's chunk, under the key of the last block before it. A load
ends where a state is, and counts only if all of it comes.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from paged.attention import LayeredPool
from paged.block_manager.content_key import extend_chain, namespace_digest
from paged.engine.disk_prefetch import Prefetch, Prefetches
from paged.engine.live_request import LiveRequest
from paged.errors import PagedError, RequestInFlight, UnknownRequest
from paged.scheduler import Batch, Hint, HintOutcome, Request, Scheduler
from paged.storage import BlockStore

PIECE_BYTES = 32 * 2**20
"""Bytes of blocks that are read at a time, and copied in between two steps."""
PATIENCE_S = 10.0
"""Seconds that a load may take, or twice the time to compute it if that is more. Then the rest is computed."""
SESSION_TOKENS = 2**24
"""Tokens of sessions' last turns that are remembered for prefetches; the turns that ended longest ago go first."""
_MOST_BACK = 1024
"""Blocks before which a state is looked for, from the last block that is there. Each chunk of a prompt leaves one."""
_WAIT_S = 0.01
"""Seconds to wait if nothing can be computed before blocks arrive."""
_RECENT = 0.2
"""The weight of the newest of several measurements."""


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a tier, in blocks: those that requests `asked` for, those of them that were `loaded` in time, and those
    `prefetched` for hints. In requests: those that were `late`, and those that were `cheaper` to compute."""

    asked: int
    loaded: int
    prefetched: int
    late: int
    cheaper: int


class _Chain:
    """The keys of a sequence's full blocks. The store has the first `num_kept`, and was asked `num_asked` times. Blocks
    that are `is_private` are not written. `named`: its prompt. `tokens`: a session's turn, full blocks as bytes. If a load
    `has_failed` of which all was needed, no other begins."""

    def __init__(self, named: Hint, *, is_private: bool = False, session: str | None = None) -> None:
        self.keys: list[bytes] = []
        self.num_kept, self.num_asked, self.is_private = 0, 0, is_private
        self.named, self.session, self.tokens, self.has_failed = named, session, bytearray(), False
        self._root = namespace_digest(named.root)

    def extend(self, data: bytes, block_bytes: int) -> None:
        """Add blocks of token ids."""
        if self.session is not None:
            self.tokens += data
        extend_chain(self.keys, self.keys[-1] if self.keys else self._root, data, block_bytes)


class _Load:
    """Blocks that a request waits for: columns `first` to `stop` - 1 of its row; the first `done` have been copied. The
    load `is_whole` when nothing is missing, the state after them included."""

    def __init__(self, request_id: str, row: int, first: int, stop: int, ends: float) -> None:
        self.request_id, self.row, self.first, self.stop, self.ends = request_id, row, first, stop, ends
        self.done = 0
        self.is_over = self.is_whole = False


class _Piece(NamedTuple):
    """Blocks that were read for a load or a prefetch, uint8 [n, block bytes]; the first `num_whole` are right. Or, after
    all blocks of a load, its state, uint8 [1, state bytes]. `seconds`: how long the read took."""

    load: _Load | Prefetch
    blocks: NDArray[np.uint8]
    num_whole: int
    seconds: float


class DiskTier:
    """The tier of one engine. `live` are its live requests by id; `states` is a store of states, if the model has any. Not
    for several threads; only reads have a thread of their own."""

    def __init__(
        self,
        store: BlockStore,
        scheduler: Scheduler,
        pool: LayeredPool,
        live: Mapping[str, LiveRequest],
        clock: Callable[[], float] = time.perf_counter,
        states: BlockStore | None = None,
    ) -> None:
        self.store, self.states = store, states
        self._scheduler, self._manager, self._pages = scheduler, scheduler.manager, pool.pages
        self._live, self._clock = live, clock
        self._size = scheduler.manager.block_size
        layout, page_bytes = scheduler.manager.layout, pool.pages.page_bytes
        # A load counts only as a whole; and a block may take several pages.
        self._has_sides, self._is_plain = bool(layout.sides), layout.is_plain
        kinds = [(number, group.kind == "state") for number, group in enumerate(layout.groups)]
        self._of_blocks = [number for number, is_state in kinds if not is_state]
        self._of_states = [number for number, is_state in kinds if is_state]
        self._block_bytes, self._state_bytes = layout.block_pages * page_bytes, layout.state_pages * page_bytes
        self._most_in_piece = max(1, PIECE_BYTES // self._block_bytes)
        # By request: the chains of its sequences; requests that ask for blocks; their loads.
        self._chains: dict[str, list[_Chain]] = {}
        self._expected: set[str] = set()
        self._loads: dict[str, _Load] = {}
        # By session: its last turn, in the order in which turns ended; and the tokens of all of them.
        self._turns: OrderedDict[str, Hint] = OrderedDict()
        self._num_turn_tokens = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="paged-disk-reader")
        self._arrived: deque[_Piece] = deque()
        self._has_arrived = Event()
        # Measured: seconds to read a block, and to compute a token; None: not yet.
        self._block_s: float | None = None
        self._token_s: float | None = None
        self._asked = self._num_loaded = self._late = self._cheaper = 0
        self.prefetches = Prefetches(
            scheduler,
            pool,
            self._look_up,
            self._read_later,
            clock,
            patience=PATIENCE_S,
            most_in_piece=self._most_in_piece,
        )

    @property
    def is_loading(self) -> bool:
        """Whether a request or a prefetch waits for blocks."""
        return bool(self._loads) or self.prefetches.is_busy

    def stats(self) -> TierStats:
        """Totals so far."""
        return TierStats(
            asked=self._asked,
            loaded=self._num_loaded,
            prefetched=self.prefetches.num_brought,
            late=self._late,
            cheaper=self._cheaper,
        )

    def hinted(self, hint: Hint, outcome: HintOutcome) -> HintOutcome:
        """Carry out a hint, of which memory made `outcome`. Return the outcome in all."""
        if hint.action not in ("prefetch", "end"):
            return outcome
        self._forget_ended()
        if hint.action == "end" and hint.session is not None:
            self._note_turn(hint.session, None)
        if hint.action == "end" or outcome.status == "accepted":
            return outcome
        named: Hint | None = hint
        if hint.request is not None:
            named = self._chains[hint.request][0].named if hint.request in self._chains else None
        elif hint.session is not None:
            named = self._turns.get(hint.session)
        if named is None:
            return outcome
        if self._is_plain:
            return self.prefetches.ask(named, outcome)
        if (below := self.num_held(named) - outcome.num_tokens) <= 0:
            return outcome
        why = f"{below:,} tokens lie on the disk alone; with layers of several kinds they come when a request is admitted."
        return HintOutcome("clipped" if outcome.num_tokens else "rejected", why, outcome.num_tokens)

    def num_held(self, hint: Hint) -> int:
        """Return how many first tokens of a hint the store has, in whole blocks. The store counts them as used."""
        chain = _Chain(hint)
        tokens = np.asarray(hint.tokens, np.int32)
        chain.extend(tokens[: len(tokens) // self._size * self._size].tobytes(), 4 * self._size)
        return self._num_there(chain.keys) * self._size

    def with_loads(self, request: Request, prompt: list[int]) -> Request:
        """Return the request so that it asks, when it is admitted, for what only the store has of it (`elsewhere`).
        From now on its full blocks are written, if others may find them."""
        self._forget_ended()
        try:
            tokens = np.asarray(prompt, np.int32)
            apart = {"salt": request.salt, "adapter": request.adapter, "extra_key": request.extra_key}
            named = Hint(action="prefetch", tokens=tokens, **apart)
            _ = named.root
        except (PagedError, OverflowError):
            # The scheduler refuses this request, and says why.
            return request
        is_private, session = not request.writes_cache, request.session_id
        # The scheduler refuses more.
        num = min(request.num_sequences, self._scheduler.limits.max_sequences)
        chains = [_Chain(named, is_private=is_private, session=session) for _ in range(num)]
        self._chains[request.id] = chains
        # The scheduler loads for one sequence.
        if not request.reads_cache or request.num_sequences > 1:
            return request
        num_blocks = max(len(tokens) - 1, 0) // self._size
        chains[0].extend(tokens[: num_blocks * self._size].tobytes(), 4 * self._size)
        return msgspec.structs.replace(request, num_computed=num_blocks * self._size)

    def elsewhere(self, request_id: str, have: int) -> tuple[int, bool]:
        """Return how many tokens of an admitted request, behind the `have` that memory has, the store has, and True:
        they come late. 0 if computing them is cheaper. The scheduler calls this."""
        [chain] = self._chains[request_id]
        chain.num_asked += 1
        num_blocks = len(chain.keys)
        if (row := self._scheduler.row_of(request_id)) >= 0:
            # A request that was preempted may have keys of all tokens that it knows.
            num_blocks = min(num_blocks, (int(self._manager.rows.num_tokens[row]) - 1) // self._size)
        more = 0 if chain.has_failed else self._num_there(chain.keys[:num_blocks]) * self._size - have
        num_read = (have + more if self._has_sides else more) // self._size
        if more <= 0 or not self._is_worth_reading(num_read, more):
            self._expected.discard(request_id)
            return 0, True
        self._expected.add(request_id)
        return more, True

    def keep(self, batch: Batch, seconds: float) -> None:
        """Write the blocks that a batch has filled. It ran in so many seconds and has not ended: a sequence may end
        with it, and release its blocks."""
        num_tokens = batch.num_tokens
        if len(batch.token_ids) == len(num_tokens) and (batch.seq_lens % self._size).all():
            # Most decodes fill no block: benchmarks/disk_cache.py.
            return
        if len(batch.token_ids) > 2 * len(num_tokens) and seconds > 0:
            # Most of its tokens are of prompts.
            self._token_s = _mean(self._token_s, seconds / len(batch.token_ids))
        stops = batch.seq_lens // self._size
        is_filled = stops > (batch.seq_lens - num_tokens) // self._size
        if is_filled.any():
            for place in is_filled.nonzero()[0].tolist():
                if batch.ids[place] in self._chains:
                    is_chunk = num_tokens.item(place) > 1
                    self._keep(batch.ids[place], batch.sequences.item(place), batch.seq_lens.item(place), is_chunk)

    def _keep(self, request_id: str, sequence: int, end: int, is_chunk: bool) -> None:
        """Write a sequence's full blocks, as far as K and V are computed (`end`) and tokens are known; and the state after
        them, if it ends a chunk."""
        chain, rows = self._chains[request_id][sequence], self._manager.rows
        try:
            row = self._scheduler.row_of(request_id, sequence)
        except UnknownRequest:
            # The request was ended meanwhile.
            return
        if chain.is_private or row < 0 or rows.num_on_host(row):
            return
        # One step ahead a later batch may have taken the tail of its blocks.
        pages = self._pages_of(row, self._of_blocks)
        stop = min(min(end, int(rows.num_tokens[row])) // self._size, len(pages))
        if len(chain.keys) < stop:
            chain.extend(rows.tokens[row, len(chain.keys) * self._size : stop * self._size].tobytes(), 4 * self._size)
        if (pages[chain.num_kept : stop] < 0).any():
            # A hit lacks what windows have passed; the store has it, or it is lost, and all behind it.
            chain.num_kept = max(chain.num_kept, self._look_up(chain.keys[:stop]))
            if (pages[chain.num_kept : stop] < 0).any():
                return
        start = chain.num_kept
        try:
            chain.num_kept += self.store.write(
                chain.keys[start:stop], lambda places: self._copied(pages[start + np.array(places)])
            )
            is_at_end = end == stop * self._size == int(rows.num_launched[row]) and chain.num_kept == stop
            if self.states is not None and is_chunk and is_at_end:
                self.states.write([chain.keys[stop - 1]], lambda _: self._copied(self._pages_of(row, self._of_states)))
        except Exception:
            # An error of a caller's store: the blocks are offered again with the next one.
            return

    def _pages_of(self, row: int, groups: list[int]) -> NDArray[np.int32]:
        """Return the pages of each of the row's blocks in these groups, int32 [columns, pages]; -1: passed. Of states: [1, pages]."""
        if self._is_plain:
            return self._manager.rows.table(row)[:, None]
        return np.concatenate([self._manager.group_pages(number, row) for number in groups], axis=1)

    def _copied(self, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return what lies on the pages of each of n blocks, or a state, uint8 [n, bytes]."""
        copied: NDArray[np.uint8] = self._pages.read(torch.from_numpy(pages.reshape(-1).astype(np.int64))).numpy()
        return copied.reshape(len(pages), -1)

    def _put(self, pages: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """Put data, uint8 [n, bytes], on the pages of n blocks, or a state."""
        places = torch.from_numpy(pages.reshape(-1).astype(np.int64))
        self._pages.write(places, torch.from_numpy(data.reshape(pages.size, -1)))

    def begin(self, batch: Batch) -> None:
        """Read the loads that an ended batch lists."""
        rows = set(batch.loads[:, 0].tolist())
        for request_id in list(self._expected):
            if request_id not in self._live:
                self._expected.discard(request_id)
            elif (
                self._scheduler.status(request_id) == "loading" and (row := self._scheduler.row_of(request_id)) in rows
            ):
                columns = batch.loads[batch.loads[:, 0] == row, 1] // self._size
                first, stop = int(columns.min()), int(columns.max()) + 1
                patience = max(PATIENCE_S, 2 * (stop - first) * self._size * (self._token_s or 0.0))
                load = self._loads[request_id] = _Load(request_id, row, first, stop, self._clock() + patience)
                self._asked += stop - first
                self._read_on(load)

    def take_arrived(self) -> None:
        """Copy in the blocks that were read, between two steps; requests whose loads are complete go on."""
        if not self.is_loading:
            self._arrived.clear()
            return
        self._has_arrived.clear()
        while self._arrived:
            piece = self._arrived.popleft()
            if isinstance(piece.load, Prefetch):
                piece.load.blocks = piece.blocks[: piece.num_whole]
            elif self._loads.get(piece.load.request_id) is piece.load and self._is_waiting(piece.load):
                self._copy_in(piece, piece.load)
        now = self._clock()
        for load in list(self._loads.values()):
            if not self._is_waiting(load):
                del self._loads[load.request_id]
            elif load.is_over or now > load.ends:
                self._late += not load.is_over
                load.is_over = True
                self._let_go_on(load)
        self.prefetches.go_on(may_read=not self._loads)

    def wait(self) -> None:
        """Wait a moment for the reader."""
        self._has_arrived.wait(_WAIT_S)

    def close(self) -> None:
        """Write all queued blocks, and stop. A second call does nothing."""
        self.prefetches.clear()
        self._reader.shutdown(cancel_futures=True)
        self.store.close()
        if self.states is not None:
            self.states.close()

    def _forget_ended(self) -> None:
        """Note ends of requests: the store counts their blocks as used now, and a session's last turn is remembered."""
        for request_id in [each for each in self._chains if each not in self._live]:
            for chain in (chains := self._chains.pop(request_id)):
                self._num_there(chain.keys)
            self._expected.discard(request_id)
            last = chains[-1]
            if last.session is not None and last.num_kept:
                tokens = np.frombuffer(bytes(last.tokens), np.int32)[: last.num_kept * self._size]
                self._note_turn(last.session, msgspec.structs.replace(last.named, tokens=tokens))

    def _note_turn(self, session: str, turn: Hint | None) -> None:
        """Remember what names a session's last turn; None: forget it."""
        if (before := self._turns.pop(session, None)) is not None:
            self._num_turn_tokens -= len(before.tokens)
        if turn is not None:
            self._turns[session] = turn
            self._num_turn_tokens += len(turn.tokens)
            while self._num_turn_tokens > SESSION_TOKENS:
                self._num_turn_tokens -= len(self._turns.popitem(last=False)[1].tokens)

    def _look_up(self, keys: list[bytes]) -> int:
        """As BlockStore.look_up."""
        try:
            return self.store.look_up(keys)
        except Exception:
            # An error of a caller's store is a miss.
            return 0

    def _num_there(self, keys: list[bytes]) -> int:
        """Return how many of these blocks a load can end behind: as many as the store has, up to the last state."""
        num = self._look_up(keys)
        if self.states is None:
            return num
        try:
            back = range(num, max(num - _MOST_BACK, 0), -1)
            return next((at for at in back if self.states.look_up(keys[at - 1 : at])), 0)
        except Exception:
            return 0

    def _is_worth_reading(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether so many blocks are read sooner than so many tokens are computed; true before both are measured."""
        if self._block_s is None or self._token_s is None:
            return True
        if num_blocks * self._block_s <= num_tokens * self._token_s:
            return True
        self._cheaper += 1
        # The disk may become faster: try it again after a while.
        self._block_s *= 0.9
        return False

    def _is_waiting(self, load: _Load) -> bool:
        """Whether the request still waits for these blocks of this row."""
        if load.request_id not in self._live or self._scheduler.status(load.request_id) != "loading":
            return False
        row = self._scheduler.row_of(load.request_id)
        return row == load.row and int(self._manager.rows.num_launched[row]) == load.first * self._size

    def _read_on(self, load: _Load) -> None:
        keys, start = self._chains[load.request_id][0].keys, load.first + load.done
        if start < load.stop:
            self._read_later(load, keys[start : min(load.stop, start + self._most_in_piece)])
        elif self.states is not None:
            self._reader.submit(self._read, load, keys[start - 1 : start], self.states, self._state_bytes)
        else:
            load.is_over = load.is_whole = True

    def _read_later(self, load: _Load | Prefetch, keys: list[bytes]) -> None:
        self._reader.submit(self._read, load, keys, self.store, self._block_bytes)

    def _read(self, load: _Load | Prefetch, keys: list[bytes], store: BlockStore, num_bytes: int) -> None:
        """Read blocks of a piece, or a state, in the reader's thread."""
        began = time.perf_counter()
        try:
            blocks = np.empty((len(keys), num_bytes), np.uint8)
            count = store.read(keys, blocks)
        except Exception:
            # An error of a caller's store is a miss, too.
            blocks, count = np.empty((0, num_bytes), np.uint8), 0
        self._arrived.append(_Piece(load, blocks, count, time.perf_counter() - began))
        self._has_arrived.set()

    def _copy_in(self, piece: _Piece, load: _Load) -> None:
        start, num = load.first + load.done, piece.num_whole
        if start == load.stop and num:
            self._put(self._pages_of(load.row, self._of_states), piece.blocks)
            load.is_over = load.is_whole = True
            return
        if num:
            # Read the table now: a load that was listed again has other blocks.
            self._put(self._pages_of(load.row, self._of_blocks)[start : start + num], piece.blocks[:num])
            load.done += num
            self._block_s = _mean(self._block_s, piece.seconds / num)
        if num < len(piece.blocks) or not len(piece.blocks):
            load.is_over = True
        else:
            self._read_on(load)

    def _let_go_on(self, load: _Load) -> None:
        num = load.done if load.is_whole or not self._has_sides else 0
        try:
            self._scheduler.loaded(load.request_id, num * self._size)
        except RequestInFlight:
            # A batch that is out computes a block before these: try again after it.
            return
        del self._loads[load.request_id]
        self._expected.discard(load.request_id)
        self._num_loaded += num
        chain = self._chains[load.request_id][0]
        chain.has_failed = self._has_sides and not num
        if chain.num_asked == 1:
            # After a preemption they have been counted already.
            self._live[load.request_id].note_loaded(num * self._size)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _RECENT * (new - before)
