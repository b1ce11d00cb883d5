"""A scheduler for vLLM: its interface over our scheduler.

    vLLM's Request  →  paged.Request             a request comes (translation.py), or is held back until its grammar, its adapter or its id is free
    paged.Batch     →  SchedulerOutput           a step is decided; the runner gets what differs (runner_view.py)
    ModelRunnerOutput → tokens → EngineCoreOutput   the step ends with its sampled tokens (answers.py)

`paged.Scheduler` decides tokens, blocks and ends. vLLM's own Request objects are only written for the parts of vLLM that read
them: grammars, and the search for repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import RequestStatus

from paged.block_manager import BlockManager, Moves
from paged.errors import PagedError, WrongAnswer
from paged.integrations.vllm.answers import Answers, packed_for_clients, sampled_by_row, speculation_of
from paged.integrations.vllm.groups import FIRST_BLOCK
from paged.integrations.vllm.host_tier import host_moves_of
from paged.integrations.vllm.live import Live
from paged.integrations.vllm.needed import installed
from paged.integrations.vllm.options import Options, host_blocks_of, options_of
from paged.integrations.vllm.refusals import carried, why_not
from paged.integrations.vllm.runner_view import RunnerView
from paged.integrations.vllm.transfers import Transfers, connector_of, encoder_connector_of
from paged.integrations.vllm.translation import request_of
from paged.scheduler import POLICIES, Batch, Policy, Scheduler as Decisions

# Below vLLM's own, whose handlers and level are what its users have set.
logger = init_logger(f"vllm.{__name__}")


class Scheduler(SchedulerInterface):
    """vLLM's `--no-async-scheduling --scheduler-cls paged.integrations.vllm.Scheduler`: one batch out at a time.

    Takes the arguments of every vLLM scheduler. Raises RefusedByPaged for features that are not carried, before the engine starts. A single request
    that is not carried, or that never fits, ends with "error", and the log says why.

    clock     seconds of events and of the order of requests; time.monotonic, as vLLM's own
    is_ahead  a step is scheduled while the one before it is out
    """

    is_ahead = False
    _view_class = RunnerView

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        options = options_of(vllm_config.additional_config)
        groups = carried(vllm_config, kv_cache_config, options, block_size, is_ahead=self.is_ahead)
        self.clock: Callable[[], float] = time.monotonic
        # vLLM reads these two.
        self.connector = connector_of(vllm_config, kv_cache_config)
        self.ec_connector = encoder_connector_of(vllm_config)
        self._live: dict[str, Live] = {}
        self._transfers: Transfers | None = None
        if self.connector is not None:
            recomputes = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
            self._transfers = Transfers(self.connector, self._live, recomputes=recomputes)
        limits = vllm_config.scheduler_config
        self._num_host_blocks = host_blocks_of(vllm_config.kv_transfer_config)
        self.manager = BlockManager(
            kv_cache_config.num_blocks - FIRST_BLOCK,
            groups.block_size,
            host_blocks=self._num_host_blocks,
            prefix_caching=options.prefix_caching,
            groups=groups.layers,
            # vLLM's runner copies only the first kind's part of a block that layers of two kinds share.
            row_ends=False,
            takes_ahead=False,
        )
        self.decisions = Decisions(
            self.manager,
            policy=_policy_of(options, limits, transfers=self._transfers is not None),
            max_tokens_per_step=limits.max_num_scheduled_tokens or limits.max_num_batched_tokens,
            max_sequences=limits.max_num_active_seqs or limits.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
            max_chunk=limits.long_prefill_token_threshold or None,
            costs=options.costs,
            resumes_known=self.is_ahead,
            elsewhere=None if self._transfers is None else self._transfers.elsewhere,
        )
        if self._transfers is not None:
            self._transfers.bind(self.decisions)
        self._grammars = structured_output_manager
        self._max_adapters = None if vllm_config.lora_config is None else vllm_config.lora_config.max_loras
        self._log_stats = log_stats
        # Live requests that our scheduler does not have yet, in order of arrival.
        self._held: dict[str, Live] = {}
        # Steps that have not ended: the runner's output, and our batch (None: nothing was decided).
        self._out: list[tuple[Any, Batch | None]] = []
        self._drafts: dict[str, list[int]] = {}
        self._pause = PauseState.UNPAUSED
        self._finished_ids: set[str] = set()
        self._finished_by_client: dict[int, set[str]] | None = {} if include_finished_set else None
        self._answers = Answers(self._grammars, groups.block_size if options.prefix_caching else 0)
        self._refused: list[Live] = []
        # Admitted requests that have not run since, and the prefix hits of those that have.
        self._unplaced: dict[str, Live] = {}
        self._hits = PrefixCacheStats()
        self._num_drafts = vllm_config.num_speculative_tokens
        self._view = self._view_class(
            self.decisions,
            groups,
            self._num_drafts,
            vllm_config.model_config.max_model_len,
            uses_v2_runner=bool(vllm_config.use_v2_model_runner),
        )
        logger.info(
            "paged's scheduler runs on vLLM %s: policy %s, %d blocks of %d tokens (%s), %d host blocks, prefix sharing %s.",
            installed(),
            options.policy,
            self.manager.num_blocks,
            groups.block_size,
            groups,
            self._num_host_blocks,
            "on" if options.prefix_caching else "off",
        )

    # Requests come and go.

    def add_request(self, request: Any) -> None:
        """Add a request. One that is not carried, or never fits, ends with "error" in the next step."""
        live = Live(request, str(request.request_id))
        if live.id in self._live:
            raise WrongAnswer(f'request "{live.id}" lives already; ids have to differ.')
        self._live[live.id] = live
        self._answers.add(live)
        if self._transfers is not None:
            self.connector.on_new_request(request)
        if self._log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        problem = why_not(request)
        if problem is not None:
            self._refuse(live, problem)
        elif self._transfers is not None or not self._submit(live):
            # The connector looks it up in the step that may admit it.
            self._held[live.id] = live

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        """End requests in any state; None: all. Return those that had not ended."""
        if not RequestStatus.is_finished(finished_status):
            raise WrongAnswer(f"a request does not end with {finished_status!r}.")
        ids = (
            list(self._live)
            if request_ids is None
            else [request_ids]
            if isinstance(request_ids, str)
            else list(dict.fromkeys(request_ids))
        )
        ended = []
        for id in ids:
            live = self._live.get(id)
            if live is None:
                continue
            self._held.pop(id, None)
            if live.is_submitted:
                self.decisions.abort(id)
            arrived = () if self._transfers is None else self._transfers.arrived
            was_loading = live.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and id not in arrived
            live.request.status = finished_status
            self._forget(live, was_loading=was_loading)
            ended.append(live.request)
        return ended

    def _submit(self, live: Live) -> bool:
        """Give the request to our scheduler, or refuse it. Return False if it has to be held back."""
        request = live.request
        if self._pause != PauseState.UNPAUSED and not live.was_admitted:
            return False
        if request.use_structured_output and not live.was_admitted:
            grammar = request.structured_output_request.grammar
            if grammar is None:
                return False
            if isinstance(grammar, Exception):
                self._refuse(live, f"its grammar cannot be compiled: {grammar}")
                return True
            request.status = RequestStatus.WAITING
        if request.lora_request is not None and not self._has_room_for(request.lora_request.lora_name):
            return False
        if any(batch is not None and live.id in batch.ids for _, batch in self._out):
            # An earlier request of this id was aborted, and its step still runs.
            return False
        if self._transfers is not None and (live.id in self._transfers.ended or not self._transfers.ask(live)):
            return False
        try:
            ours = request_of(request, live.prompt, live.num_left, transfers=self._transfers is not None)
            self.decisions.add(ours, now=request.arrival_time)
        except PagedError as error:
            self._refuse(live, str(error))
            return True
        live.is_submitted = True
        return True

    def _has_room_for(self, adapter: str) -> bool:
        """Whether the runner has a slot for this adapter beside those of all submitted requests."""
        active = {
            live.request.lora_request.lora_name
            for live in self._live.values()
            if live.is_submitted and live.request.lora_request is not None
        }
        return adapter in active or len(active) < (self._max_adapters or 1)

    def _refuse(self, live: Live, problem: str) -> None:
        logger.error('paged: request "%s" ends with "error": %s', live.id, problem)
        live.problem = problem
        self._refused.append(live)

    def _forget(self, live: Live, *, was_loading: bool = False) -> Any:
        """Forget a request that has ended; the runner forgets it with the next step. Return the connector's parameters for its last output."""
        said = None if self._transfers is None else self._transfers.finish(live, was_loading=was_loading)
        if self.ec_connector is not None:
            self.ec_connector.request_finished(live.request)
        del self._live[live.id]
        self._answers.forget(live)
        self._unplaced.pop(live.id, None)
        self._drafts.pop(live.id, None)
        self._finished_ids.add(live.id)
        if self._finished_by_client is not None:
            self._finished_by_client.setdefault(live.request.client_index, set()).add(live.id)
        return said

    # A step is decided.

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Decide a step. Return it for the runner."""
        if self._transfers is not None:
            for id in self._transfers.deliver():
                self._note_admitted(id, self.clock())
        is_clean = self._transfers is None or self._transfers.is_clean()
        if self._held and is_clean and self._pause != PauseState.PAUSED_ALL:
            for live in list(self._held.values()):
                if self._submit(live):
                    self._held.pop(live.id, None)
        batch = None
        if self._pause == PauseState.PAUSED_ALL:
            output = self._view.nothing()
        else:
            now = self.clock()
            batch = self.decisions.schedule(now, self._drafts_of_running())
            output = self._output_of(batch, now)
        if self._num_host_blocks:
            output.kv_connector_metadata = host_moves_of(Moves() if batch is None else batch.moves)
        output.finished_req_ids, self._finished_ids = self._finished_ids, set()
        if self._transfers is not None:
            self._transfers.fill_in(output, batch)
        if self.ec_connector is not None:
            output.ec_connector_metadata = self.ec_connector.build_connector_meta(output)
        if self._transfers is not None and batch is not None and not len(batch.rows) and not batch.has_outputs:
            # It only has loads, whose end the connector reports.
            if not batch.is_empty:
                self.decisions.update(batch, [], now=self.clock())
            batch = None
        self._out.append((output, batch))
        return output

    def _drafts_of_running(self) -> dict[str, list[int]] | None:
        drafts, self._drafts = self._drafts, {}
        return {id: tokens for id, tokens in drafts.items() if self.decisions.status(id) == "running"} or None

    def _output_of(self, batch: Batch, now: float) -> Any:
        if self._transfers is not None:
            for id, found in self._transfers.note_admitted(batch).items():
                self._note_hit(self._live[id], *found)
        loading = () if self._transfers is None else self._transfers.loading
        for id in batch.admitted:
            if id not in loading:
                self._note_admitted(id, now)
        output = self._view.output_of(batch, self._live)
        placed = self._unplaced.keys() & output.num_scheduled_tokens.keys()
        if placed:
            starts = dict(zip(batch.ids.tolist(), (batch.seq_lens - batch.num_tokens).tolist()))
            for id in placed:
                self._note_hit(self._unplaced.pop(id), starts[id])
        if batch.preempted:
            self._note_preempted(batch.preempted, now)
        if self._answers.num_grammars:
            output.has_structured_output_requests = any(
                self._live[id].request.use_structured_output
                for id, samples in zip(batch.ids.tolist(), batch.samples.tolist())
                if samples
            )
        return output

    def _note_admitted(self, id: str, now: float) -> None:
        live = self._live[id]
        self._view.open(live)
        live.request.status = RequestStatus.RUNNING
        if self._transfers is None:
            self._unplaced[id] = live
        if not live.was_admitted or self._log_stats or self._transfers is not None:
            self._answers.note(live)
        if self._log_stats:
            live.request.record_event(EngineCoreEventType.SCHEDULED, now)

    def _note_preempted(self, preempted: tuple[tuple[str, str], ...], now: float) -> None:
        for id, _ in preempted:
            live = self._live.get(id)
            if live is None:
                continue
            live.request.num_preemptions += 1
            live.request.status = RequestStatus.PREEMPTED
            if self._log_stats:
                self._answers.note(live)
                live.request.record_event(EngineCoreEventType.PREEMPTED, now)

    def _note_hit(self, live: Live, num_hit: int, num_elsewhere: int = 0) -> None:
        """Note a request's hits at its admission, here and elsewhere."""
        request = live.request
        if self._log_stats:
            self._hits.record(
                num_tokens=request.num_prompt_tokens,
                num_hits=min(num_hit, request.num_prompt_tokens),
                preempted=live.was_admitted,
            )
        if not live.was_admitted and request.prefill_stats is not None:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=num_hit,
                num_external_cached_tokens=num_elsewhere,
            )
        live.was_admitted = True

    # A step has run.

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """Return the tokens that the grammars of this step allow; None without grammars."""
        if not scheduler_output.has_structured_output_requests:
            return None
        batch = self._batch_of(scheduler_output)
        assert batch is not None, "a grammar's request was scheduled"
        constrained = {}
        for id, samples in zip(batch.ids.tolist(), batch.samples.tolist()):
            live = self._live.get(id)
            # Not a new request under the id of one that has ended.
            if samples and live is not None and live.is_submitted and live.request.use_structured_output:
                constrained[id] = live.request
        if not constrained:
            return None
        ids, drafts = list(constrained), scheduler_output.scheduled_spec_decode_tokens
        mask = self._grammars.grammar_bitmask(constrained, ids, drafts)
        return GrammarOutput(ids, mask, [len(drafts.get(id, ())) for id in ids])

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """End a step. Return outputs by client. Raises WrongAnswer, and changes nothing, for an output that does not fit the scheduled step."""
        batch, speculation = self._batch_of(scheduler_output), None
        while self._out[0][0] is not scheduler_output and self._out[0][1] is None:
            # vLLM need not end a step in which nothing was decided.
            del self._out[0]
        if self._out[0][0] is not scheduler_output:
            raise WrongAnswer(
                "steps end in the order in which they were scheduled; an older one than this has not ended."
            )
        made: list[Any] = []
        ended: list[Live] = []
        reported = None if self._transfers is None else model_runner_output.kv_connector_output
        if reported is not None and self._is_taken_back(batch, reported):
            batch = None
        if batch is not None:
            tokens, counts = sampled_by_row(batch, model_runner_output, drafts=self._num_drafts > 0)
            try:
                outputs = self.decisions.update(batch, tokens, counts, now=self.clock())
            except PagedError as error:
                raise WrongAnswer(f"the runner's output does not fit what was scheduled: {error}") from error
            made, ended = self._answers.made_of(outputs, self._live, model_runner_output)
            if self._log_stats and counts is not None and self._num_drafts:
                speculation = speculation_of(batch, counts, self._num_drafts)
            if self._transfers is not None:
                self._transfers.note_ended_step(batch, made)
        del self._out[0]
        for live in self._refused:
            if self._live.get(live.id) is live:
                made.append(self._answers.refusal_of(live))
                ended.append(live)
        self._refused = []
        clients = self._answers.by_client(made, self._live)
        last = {output.request_id: output for output in made} if self._transfers is not None else {}
        for live in ended:
            # No effect if our scheduler has ended it.
            if live.is_submitted:
                self.decisions.abort(live.id)
            said = self._forget(live)
            if said is not None:
                last[live.id].kv_transfer_params = said
        if reported is not None and self._transfers is not None:
            self._transfers.take(reported)
        finished = self._finished_by_client
        if finished:
            self._finished_by_client = {}
        return packed_for_clients(clients, finished, self.make_stats(speculation, reported))

    def _is_taken_back(self, batch: Batch | None, reported: Any) -> bool:
        """Handle failed loads. Return whether the step was taken back because it computed after one."""
        assert self._transfers is not None, "a connector reported something"
        lost = self._transfers.lost_in(reported, batch)
        refused = lost.misled if self._transfers.recomputes else lost.lives
        why = "it may have answered behind it" if self._transfers.recomputes else "kv_load_failure_policy is fail"
        for live in refused:
            self._refuse(live, f"its KV could not be loaded, and {why}")
        if lost.is_void and batch is not None:
            for live in self._transfers.loading_in(batch):
                # It may share blocks that are taken back.
                self._withdraw(live)
            self.decisions.cancel(batch, moved=True)
            self._view.resend(batch)
            self._transfers.note_taken_back(batch)
        if lost.is_late:
            for live in [each for each in self._live.values() if each.is_submitted and each not in refused]:
                self._withdraw(live)
        return lost.is_void

    def _batch_of(self, scheduler_output: Any) -> Batch | None:
        for output, batch in self._out:
            if output is scheduler_output:
                return batch
        raise WrongAnswer("this output's step is not out: each ends once.")

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Take drafts for the next step, as far as each request's grammar allows them."""
        for id, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids):
            live = self._live.get(id)
            if live is not None and tokens:
                self._drafts[id] = list(self._grammars.validate_tokens(live.request, tokens))

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Raise WrongAnswer: drafts with two batches out are refused at the start."""
        raise WrongAnswer("drafts have to be known before their step is scheduled.")

    # Queries, pauses and resets.

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that a step could run; 0 while all are paused."""
        if self._pause == PauseState.PAUSED_ALL:
            return 0
        if self._pause == PauseState.PAUSED_NEW:
            return len(self._live) - len(self._held)
        return len(self._live)

    def has_request(self, request_id: str) -> bool:
        """Whether the request is live."""
        return request_id in self._live

    def has_finished_requests(self) -> bool:
        """Whether the runner has to forget requests that have ended, or a connector has not finished with some."""
        return bool(self._finished_ids) or (self._transfers is not None and bool(self._transfers.ended))

    def has_requests(self) -> bool:
        """Whether there is anything to do, also for a connector."""
        if self.get_num_unfinished_requests() or self.has_finished_requests():
            return True
        return self._transfers is not None and bool(self.connector.has_pending_push_work())

    def get_request_counts(self) -> tuple[int, int]:
        """Return the numbers of running and of other requests."""
        num_running = self.decisions.counts()["running"]
        return num_running, len(self._live) - num_running

    def get_kv_cache_usage(self) -> float:
        """Return the share of used blocks, 0 to 1."""
        return self.manager.device.num_used / self.manager.num_blocks

    @property
    def pause_state(self) -> Any:
        """What is paused."""
        return self._pause

    def set_pause_state(self, pause_state: Any) -> None:
        """Pause or go on. While new requests are paused, those that have not begun are held back here."""
        logger.info("paged: pause state %s", pause_state.name)
        self._pause = pause_state
        if pause_state != PauseState.UNPAUSED:
            for id in self.decisions.waiting_ids():
                if not self._live[id].was_admitted:
                    self._withdraw(self._live[id])

    def _withdraw(self, live: Live) -> None:
        """Take the request back from our scheduler, with its outputs so far."""
        tokens = self.decisions.tokens_of(live.id)
        live.num_left -= len(tokens) - len(live.prompt)
        live.prompt = tokens
        self.decisions.abort(live.id)
        if self._transfers is not None:
            self._transfers.withdraw(live)
        live.is_submitted = False
        self._held[live.id] = live

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all content. Return False while any block is used; with `reset_running_requests` running requests give up their blocks and are computed
        again."""
        if reset_running_requests:
            loading = () if self._transfers is None else self._transfers.loading
            for live in [live for live in self._live.values() if live.is_submitted and live.id not in loading]:
                self._withdraw(live)
        done = self.manager.reset_cache()
        if done and self._log_stats:
            self._hits.reset = True
        return done and (not reset_connector or self.reset_connector_cache())

    def reset_connector_cache(self) -> bool:
        """Forget what a connector holds. Return False if it cannot."""
        return self._transfers is None or self._transfers.reset()

    def reset_encoder_cache(self) -> None:
        """Do nothing: there is none."""

    def make_stats(self, speculation: Any = None, reported: Any = None) -> Any:
        """Return the statistics for vLLM's metrics; None if they are off. `reported`: a connector's output of the step."""
        moved = None if self._transfers is None else self._transfers.statistics(reported)
        if not self._log_stats:
            return None
        hits, self._hits = self._hits, PrefixCacheStats()
        num_running, num_waiting = self.get_request_counts()
        return SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting - len(self._held),
            num_skipped_waiting_reqs=len(self._held),
            kv_cache_usage=self.get_kv_cache_usage(),
            prefix_cache_stats=hits,
            spec_decoding_stats=speculation,
            connector_prefix_cache_stats=None if self._transfers is None else self._transfers.take_external(),
            kv_connector_stats=None if moved is None else moved.to_dict(),
        )

    def get_kv_connector(self) -> Any:
        """Return the scheduler's side of vLLM's KV connector; None: there is none."""
        return self.connector

    def get_ec_connector(self) -> Any:
        """Return the scheduler's side of vLLM's encoder connector; None: there is none."""
        return self.ec_connector

    def shutdown(self) -> None:
        """Shut the connectors down."""
        for each in (self.connector, self.ec_connector):
            if each is not None:
                each.shutdown()

    def check(self) -> list[str]:
        """Return every violated invariant of decisions and memory, as sentences; empty if there is none."""
        return self.decisions.check()


def _policy_of(options: Options, limits: Any, *, transfers: bool) -> Policy:
    """Return the named policy with vLLM's settings for the order (unless it is "cached") and for splitting prompts. `transfers`: a victim keeps nothing,
    since a connector looks a request up again when it comes back."""
    policy = POLICIES[options.policy]
    order = policy.order if policy.order == "cached" else "priority" if limits.policy == "priority" else "fcfs"
    if transfers:
        policy = msgspec.structs.replace(policy, take="whole", preemption="recompute")
    return msgspec.structs.replace(policy, order=order, chunked=policy.chunked and bool(limits.enable_chunked_prefill))
