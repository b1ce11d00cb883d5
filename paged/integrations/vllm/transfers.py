"""vLLM's KV connectors: their loads and saves are loads and saves of our scheduler.

    get_num_new_matched_tokens   before our scheduler gets a request, and at its admission if its hit has changed
    update_state_after_alloc     with the step that admits it
    finished_recving             `loaded` with the next step, with the number of tokens that arrived
    request_finished             at its end; its blocks stay held until `saved`: at once, or when the connector has finished

A load may come with its step, which computes after it at once. If it fails, the step is taken back: all of it is computed again, and no
other request has used what did not arrive. If the failure is reported only later, any content may be wrong: all content is forgotten, and
all requests are computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from paged.errors import RequestInFlight
from paged.integrations.vllm.groups import FIRST_BLOCK
from paged.integrations.vllm.live import Live
from paged.integrations.vllm.options import is_host_tier
from paged.scheduler import Batch, Scheduler as Decisions

# Below vLLM's own, whose handlers and level are what its users have set.
logger = init_logger(f"vllm.{__name__}")

# In place of vLLM's hash for a block that was found here: connectors only check that there is one.
_FOUND_HERE = b"found here"
# In `states` of a pool.
_CACHED = 1


def connector_of(vllm_config: Any, kv_cache_config: Any) -> Any:
    """Return the scheduler's side of the configured KV connector; None without one, and for our own, which has none."""
    asked = vllm_config.kv_transfer_config
    if asked is None or is_host_tier(asked):
        return None
    return KVConnectorFactory.create_connector(
        config=vllm_config, role=KVConnectorRole.SCHEDULER, kv_cache_config=kv_cache_config
    )


def encoder_connector_of(vllm_config: Any) -> Any:
    """Return the scheduler's side of the configured encoder connector, which text does not use; None without one."""
    if vllm_config.ec_transfer_config is None:
        return None
    return ECConnectorFactory.create_connector(config=vllm_config, role=ECConnectorRole.SCHEDULER)


def counting_connectors(vllm_config: Any) -> str:
    """Return the names of configured connectors that use vLLM's own block pool; empty: there are none."""
    asked = vllm_config.kv_transfer_config
    if asked is None or is_host_tier(asked):
        return ""
    found = KVConnectorFactory.get_connector_class(asked)
    parts = getattr(found, "_get_connector_classes_and_configs", None)
    classes = [found] if parts is None else [each for each, _ in parts(vllm_config)]
    hooks = ("bind_kv_cache_manager", "bind_gpu_block_pool")
    return ", ".join(
        each.__name__
        for each in classes
        if any(getattr(each, hook) is not getattr(KVConnectorBase_V1, hook) for hook in hooks)
    )


class Lost(NamedTuple):
    """The failed loads of a step's KVConnectorOutput.

    lives    requests whose loads failed
    misled   those of them that have outputs computed after such a load
    is_void  the step computed after one, and has to be taken back
    is_late  an earlier step did, so content is wrong
    """

    lives: list[Live]
    misled: list[Live]
    is_void: bool
    is_late: bool


class Transfers:
    """Calls a connector, and keeps its loads and saves of our scheduler.

    lives       the plug-in's live requests by id
    recomputes  the tokens of failed loads are computed; else their requests end with an error
    arrived     ids of requests whose load has ended, until `deliver`
    ended       by id of a request that has ended, or was withdrawn, before the connector has finished with it: whether blocks are held
    external    hits elsewhere since the last statistics
    """

    def __init__(self, connector: Any, lives: dict[str, Live], *, recomputes: bool) -> None:
        self.connector = connector
        self.lives = lives
        self.recomputes = recomputes
        self.arrived: set[str] = set()
        self.ended: dict[str, bool] = {}
        self.external = PrefixCacheStats()
        # Loading requests: the first token, and the number of tokens. For loads that failed in part: the end of the right tokens.
        self.loading: dict[str, tuple[int, int]] = {}
        self._valid_to: dict[str, int] = {}
        # The connector's answers of this step: hit, tokens elsewhere, whether they load asynchronously; and those of admitted requests.
        self._asked: dict[str, tuple[int, int, bool]] = {}
        self._matched: dict[str, tuple[int, int]] = {}
        # Whether content has to be forgotten before a request is admitted.
        self._is_spoilt = False
        # Requests that were withdrawn since the last step.
        self.withdrawn: set[str] = set()

    def bind(self, decisions: Decisions) -> None:
        """Take the scheduler that calls `elsewhere`."""
        self._decisions, self._manager = decisions, decisions.manager

    # A step is decided.

    def ask(self, live: Live) -> bool:
        """Look up the request in the connector. Return False if it does not know yet."""
        request, size = live.request, self._manager.block_size
        if request.skip_reading_prefix_cache:
            return True
        name = None if request.lora_request is None else request.lora_request.lora_name
        namespace = None if request.cache_salt is None and name is None else (request.cache_salt, name, None)
        hit = min(self._manager.lookup(live.prompt, namespace).num_tokens, (len(live.prompt) - 1) // size * size)
        num_more, is_late = self.connector.get_num_new_matched_tokens(request, hit)
        if num_more is None:
            return False
        self._asked[live.id] = hit, num_more, is_late
        return True

    def elsewhere(self, id: str, hit: int) -> tuple[int, bool]:
        """Return `Scheduler.elsewhere` of a request at its admission. If the hit has changed, the connector looks it up again; tokens that it does not
        know then are computed."""
        asked = self._asked.pop(id, None)
        if asked is None or asked[0] != hit:
            asked = (hit, *self.connector.get_num_new_matched_tokens(self.lives[id].request, hit))
        num_more, is_late = asked[1] or 0, bool(asked[1]) and asked[2]
        self._matched[id] = hit, num_more
        return num_more, is_late

    def deliver(self) -> list[str]:
        """Pass ended loads to our scheduler. Return the ids of requests that go on."""
        goes_on = []
        for id in sorted(self.arrived & self.loading.keys()):
            hit, num = self.loading[id]
            try:
                self._decisions.loaded(id, min(num, max(self._valid_to.get(id, hit + num) - hit, 0)))
            except RequestInFlight:
                # It shares a block that an outstanding step computes.
                continue
            self._stop_loading(id)
            goes_on.append(id)
        self.arrived &= self.loading.keys()
        return goes_on

    def _stop_loading(self, id: str) -> None:
        self.arrived.discard(id)
        self._valid_to.pop(id, None)
        self.loading.pop(id, None)

    def note_admitted(self, batch: Batch) -> dict[str, tuple[int, int]]:
        """Give the connector the blocks of requests that this step admitted. Return their hits here and elsewhere."""
        admitted: dict[str, tuple[int, int]] = {}
        loads = set(batch.loads[:, 0].tolist())
        for id in batch.admitted:
            live, row = self.lives[id], self._decisions.row_of(id)
            hit, num_more = self._matched.get(id, (0, 0))
            if id not in self._matched:
                hit = int(self._manager.rows.num_computed[row])
            num_more = num_more if row in loads else 0
            request, size = live.request, self._manager.block_size
            blocks = [
                KVCacheBlock(block_id=block + FIRST_BLOCK, _block_hash=_FOUND_HERE if column < hit // size else None)
                for column, block in enumerate(self._manager.table(row).tolist())
            ]
            self.connector.update_state_after_alloc(request, KVCacheBlocks((blocks,)), num_more)
            self._count(request, hit, num_more)
            if self._decisions.status(id) == "loading":
                # At least one token is left to compute.
                self.loading[id] = hit, min(num_more, request.num_tokens - 1 - hit)
                request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            request.num_computed_tokens = hit + num_more
            admitted[id] = hit, num_more
        self._asked, self._matched = {}, {}
        return admitted

    def _count(self, request: Any, hit: int, num_more: int) -> None:
        was_preempted, sources = request.num_preemptions > 0, None
        if num_more and not was_preempted:
            sources = self.connector.get_external_cache_hit_sources(request, num_more)
        if request.num_tokens > hit and not request.skip_reading_prefix_cache:
            self.external.record(
                num_tokens=request.num_tokens - hit,
                num_hits=num_more,
                preempted=was_preempted,
                hits_by_source=sources,
            )

    def fill_in(self, output: Any, batch: Batch | None) -> None:
        """Put the connector's work of this step into the runner's output."""
        preempted = {id for id, _ in batch.preempted} if batch is not None else set()
        if lost := self.withdrawn | preempted:
            output.preempted_req_ids = lost | (output.preempted_req_ids or set())
        for id in preempted & self.lives.keys():
            self.lives[id].request.num_computed_tokens = 0
        self.withdrawn = set()
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            cached.all_token_ids |= {id: self._decisions.tokens_of(id).tolist() for id in cached.resumed_req_ids}
        if batch is not None:
            starts = (batch.seq_lens - batch.num_tokens).tolist()
            for id, start in zip(batch.ids.tolist(), starts):
                self.lives[id].request.num_computed_tokens = start
            loading = {row for id in self.loading for row in self._decisions.rows_of(id)}
            output.has_sync_kv_loads = bool(set(batch.loads[:, 0].tolist()) - loading)
        output.kv_connector_block_state = KVConnectorBlockState(
            set(output.num_scheduled_tokens), lambda id: (self._blocks_of(self._decisions.row_of(id)),), {}
        )
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        output.kv_connector_block_state = None
        for id, count in output.num_scheduled_tokens.items():
            self.lives[id].request.num_computed_tokens += count

    def _blocks_of(self, row: int) -> list[int]:
        return (self._manager.table(row) + FIRST_BLOCK).tolist()

    # A step has run.

    def lost_in(self, reported: Any, batch: Batch | None) -> Lost:
        """Return the failed loads of a step's KVConnectorOutput. If they are late, no request is admitted before all content is forgotten."""
        invalid = np.array(sorted(reported.invalid_block_ids), np.int64) - FIRST_BLOCK
        invalid = invalid[(invalid >= 0) & (invalid < self._manager.num_blocks)]
        found, misled, is_void = dict[str, Live](), list[Live](), False
        # Requests that have ended left it as content, which others may hit.
        is_late = bool((self._manager.device.states[invalid] == _CACHED).any())
        came_now = () if batch is None else batch.loads[:, 2]
        for id, live in self.lives.items() if len(invalid) else ():
            rows = self._decisions.rows_of(id) if live.is_submitted else ()
            for row in rows:
                table = self._manager.table(row)
                wrong = np.isin(table, invalid).nonzero()[0]
                if not len(wrong):
                    continue
                found[id], first = live, int(wrong[0]) * self._manager.block_size
                if id in self.loading and first >= self.loading[id][0]:
                    self._valid_to[id] = min(first, self._valid_to.get(id, first))
                elif np.isin(table[wrong], came_now).all():
                    is_void = True
                else:
                    is_late = True
                    misled += [live] if live.request.num_tokens > live.request.num_prompt_tokens else []
        for id in reported.failed_recving & self.loading.keys():
            found[id], self._valid_to[id] = self.lives[id], 0
        if found:
            what = "what did not arrive is computed" if self.recomputes else "they end with an error"
            logger.warning("paged: loads failed of requests %s; %s.", ", ".join(sorted(found)), what)
        if is_late:
            logger.error(
                "paged: a load was reported as failed after its step; all content is forgotten, and what runs is computed again."
            )
        self._is_spoilt |= is_late
        return Lost(list(found.values()), misled, is_void or is_late, is_late)

    def is_clean(self) -> bool:
        """Forget all content if some may be wrong. Return False while transfers hold blocks; then no request may be admitted."""
        self._is_spoilt = self._is_spoilt and not self._manager.reset_cache()
        return not self._is_spoilt

    def note_ended_step(self, batch: Batch, made: Iterable[Any]) -> None:
        """Note in vLLM's requests their computed tokens and outputs."""
        for output in made:
            live = self.lives.get(output.request_id)
            if live is not None and not live.is_watched:
                live.request.append_output_token_ids(output.new_token_ids)
        for id in batch.ids.tolist():
            if (live := self.lives.get(id)) is not None:
                # Wrong drafts do not count.
                live.request.num_computed_tokens = min(live.request.num_computed_tokens, live.request.num_tokens - 1)

    def loading_in(self, batch: Batch) -> list[Live]:
        """Return the requests whose late load begins with this step."""
        rows = set(batch.loads[:, 0].tolist())
        return [self.lives[id] for id in self.loading if rows & set(self._decisions.rows_of(id))]

    def note_taken_back(self, batch: Batch) -> None:
        """Note in vLLM's requests how far they are computed now."""
        for id in batch.ids.tolist():
            if (live := self.lives.get(id)) is not None and self._decisions.status(id) == "running":
                row = self._decisions.row_of(id)
                live.request.num_computed_tokens = int(self._manager.rows.num_computed[row])

    def take(self, reported: Any) -> None:
        """Note the transfers that have ended."""
        self.connector.update_connector_output(reported)
        for id in sorted(reported.finished_recving or ()):
            if id in self.ended:
                self._let_go(id)
            elif id in self.loading:
                self.arrived.add(id)
            else:
                logger.warning('paged: the connector has loaded for request "%s", which waits for nothing.', id)
        for id in sorted(reported.finished_sending or ()):
            if id in self.ended:
                self._let_go(id)
            else:
                logger.warning('paged: the connector has saved request "%s", of which nothing is held.', id)

    def _let_go(self, id: str) -> None:
        if self.ended.pop(id):
            self._decisions.saved(id)

    def finish(self, live: Live, *, was_loading: bool) -> Any:
        """End a request: its blocks go, or stay held until the connector has finished. Return the connector's parameters for its last
        output. `was_loading`: it ended before its load did."""
        is_loading = was_loading or (live.id in self.loading and live.id not in self.arrived)
        self._stop_loading(live.id)
        size, request = self._manager.block_size, live.request
        held: NDArray[np.int64] = self._decisions.saving_blocks(live.id) if live.is_submitted else np.zeros(0, np.int64)
        blocks = (held[: -(-int(request.num_computed_tokens) // size)] + FIRST_BLOCK).tolist()
        if isinstance(self.connector, SupportsHMA):
            delays, params = self.connector.request_finished_all_groups(request, (blocks,))
        else:
            delays, params = self.connector.request_finished(request, blocks)
        if live.id not in self.ended:
            self.ended[live.id] = live.is_submitted
            if not (delays or is_loading):
                self._let_go(live.id)
        return params

    def withdraw(self, live: Live) -> None:
        """Note a request that was taken back from our scheduler. It holds nothing when it comes again, after its load has ended."""
        self.ended[live.id] = True
        if live.id not in self.loading or live.id in self.arrived:
            self._let_go(live.id)
        self._stop_loading(live.id)
        self.withdrawn.add(live.id)
        live.request.status, live.request.num_computed_tokens = RequestStatus.PREEMPTED, 0

    def statistics(self, reported: Any) -> Any:
        """Return the statistics of both sides of the connector in a step, aggregated; None: there are none."""
        worker = None if reported is None else reported.kv_connector_stats
        own = self.connector.get_kv_connector_stats()
        if own is None or own.is_empty():
            return worker
        return own if worker is None else worker.aggregate(own)

    def take_external(self) -> Any:
        """Return the statistics of hits elsewhere since the last call."""
        external, self.external = self.external, PrefixCacheStats()
        return external

    def reset(self) -> bool:
        """Forget what the connector holds. Return False if it cannot."""
        if self.connector.reset_cache() is False:
            return False
        self.external.reset = True
        return True
