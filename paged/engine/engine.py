"""Requests on one model: added, stepped, read as text, ended.

The clock and a seed for each request are given from outside. The caller makes one call at a time.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paged.attention import KVPool, LayeredPool
from paged.base.extras import import_with_extra
from paged.base.turns import Turns
from paged.base.uninterrupted import Uninterrupted
from paged.base.words import short_cause, shown
from paged.block_manager import BlockManager
from paged.decoding.draft_model import DraftModel
from paged.decoding.drafter import Drafter
from paged.decoding.lookahead import Lookahead
from paged.decoding.lookup import PromptLookup
from paged.decoding.searches import Found, Searches
from paged.engine.config import DISK_CACHE_GB, EngineConfig
from paged.engine.disk_identity import identity_of
from paged.engine.disk_tier import DiskTier
from paged.engine.door import checked_text, checked_time, checked_tokens
from paged.engine.executor import LocalExecutor
from paged.engine.live_request import LiveRequest, LiveSequence
from paged.engine.memory import block_size_of, memory_for
from paged.engine.results import EngineOutput, EngineStats
from paged.engine.steps import FailedBatch, OnLogits, Steps
from paged.engine.undelivered import Undelivered
from paged.errors import (
    BadLogits,
    CannotAdjust,
    DuplicateRequest,
    EngineInUse,
    InvalidConfig,
    InvalidRequest,
    InvalidSampling,
    UnknownRequest,
    UnsupportedByLayers,
)
from paged.model.capacity import with_kv_dtype
from paged.model.checkpoint import named_or_shipped
from paged.model.costs import measured_costs
from paged.model.drafts import check_length, draft_for
from paged.model.dtypes import warn_if_slow
from paged.model.kept_layers import strides_of
from paged.model.loading import LoadedModel, config_of, load_model
from paged.model.parallel.messages import Make
from paged.model.parallel.ranks import Ranks, load_split
from paged.model.parallel.worker import TensorParallelWorker
from paged.model.runner import Runner, runner_for
from paged.model.worker import Worker
from paged.sampling.params import SamplingParams
from paged.sampling.rows import RowSampling
from paged.sampling.sampler import seed_of, seed_of_sequence
from paged.sampling.search_params import SearchParams
from paged.sampling.structured import StructuredOutputsParams
from paged.scheduler import (
    FINISH_REASONS,
    Batch,
    Hint,
    HintOutcome,
    Output,
    Outputs,
    PrefixExplanation,
    Request,
    RequestUsage,
    Retention,
    Scheduler,
    SessionView,
)
from paged.storage import BlockStore

if TYPE_CHECKING:
    from paged.sampling.grammars import Grammar, Grammars

OpenStore = Callable[[bytes, int], BlockStore]


class Engine:
    """Runs requests on one model, whose KV lives in a pool of blocks.

    model       an EngineConfig, a checkpoint folder, a model that ships (embedded, hybrid), a LoadedModel or None
                (embedded)
    options     settings of an EngineConfig by name; they win over `model`'s
    clock       seconds
    open_store  instead of disk_cache: opens a store of blocks below memory (docs/tiers.md), given the identity of the
                engine's blocks, 32 bytes, and the bytes of a block

    Two attributes are called while a step runs, in its thread; None: nothing is called.

    on_logits(id, place, row)
                before a token is chosen: its request, the number of outputs before it, and its logits, float32
                [vocabulary]; again for the same tokens after a step was taken back, and one step ahead also for a
                token after the last one
    on_batch(batch)
                after a batch has run and was updated

    Callbacks may add, finish and abort requests; `step` within them raises EngineInUse. `step` passes their errors on.
    An error in on_logits takes the step back; after one in on_batch the next step returns what this one brought.

    Raises InvalidConfig, ModelError, BudgetTooSmall, UnknownPolicy, UnknownBackend, UnsupportedByBackend, and
    UnusableStore for a disk cache. Warns (PagedWarning) of a dtype that is slow on this processor, and if nothing can
    be compiled.
    """

    def __init__(
        self,
        model: EngineConfig | LoadedModel | str | Path | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        open_store: OpenStore | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.of(model, **options)
        self._clock = clock
        given, ranks = _loaded(self.config)
        try:
            self._set_up(given, ranks, open_store)
        except BaseException:
            # A caller that keeps the error keeps the ranks, too: end them.
            if ranks is not None:
                ranks.end("its engine could not be made")
            raise

    def _set_up(self, given: LoadedModel, ranks: Ranks | None, open_store: OpenStore | None) -> None:
        """Make all that runs requests on a model, and on its ranks. Raises as the constructor."""
        config, clock = self.config, self._clock
        its_kv = config.memory
        self.model, kv_dtype = with_kv_dtype(given, its_kv.kv_cache_dtype, its_kv.kv_cache_dtype_skip_layers)
        longest = _longest(config.model.max_model_len, self.model.max_length)
        draft = draft_for(self.model, config.decoding.draft_model) if config.decoding.speculate == "draft" else None
        if draft is not None:
            check_length(draft, longest)
        models = [self.model] if draft is None else [self.model, draft]
        manager, pools = memory_for(config, models, longest, kv_dtype, ranks=ranks)
        self.pool = pools[0]
        self.runner = _runner(config, self.model, self.pool, ranks)
        warn_if_slow(self.model)
        steps = config.scheduling
        # The scheduler holds no reference to the engine, so a forgotten engine frees its memory at once.
        own = weakref.proxy(self)

        def ask_disk(request_id: str, have: int) -> tuple[int, bool]:
            found: tuple[int, bool] = own.disk.elsewhere(request_id, have)
            return found

        self.scheduler = Scheduler(
            manager,
            policy=steps.policy,
            tenant_weights=steps.tenant_weights,
            max_tokens_per_step=steps.budget_on(self.model.device.type),
            max_sequences=steps.max_sequences,
            max_chunk=steps.max_chunk,
            max_model_len=longest,
            vocabulary_size=self.model.vocabulary_size,
            costs=measured_costs(self.runner, clock) if steps.costs == "measured" else steps.costs,
            max_pinned=its_kv.max_pinned,
            max_pinned_per_tenant=its_kv.max_pinned_per_tenant,
            max_cached_per_tenant=its_kv.max_cached_per_tenant,
            remember_evicted=its_kv.remember_evicted,
            elsewhere=None if its_kv.disk_cache is None and open_store is None else ask_disk,
        )
        self.on_logits: OnLogits | None = None
        self.on_batch: Callable[[Batch], None] | None = None
        self.turns = Turns(EngineInUse)
        self._sampling = RowSampling()
        self._drafter: Drafter | None = None
        # Drafts beyond a step's token budget are never computed; lookahead decoding has arrays of as many, of 6 at least.
        most = min(config.decoding.most_drafts, max(6, self.scheduler.limits.max_tokens_per_step))
        if draft is not None:
            # Guesses may depend on what else is in a batch; answers do not.
            its_runner = runner_for(
                draft,
                pools[1],
                backend=config.model.backend,
                batch_invariant=False,
                enforce_eager=config.model.enforce_eager,
            )
            self._drafter = DraftModel(its_runner, self._sampling, most)
        elif config.decoding.speculate is not None:
            self._drafter = PromptLookup(most) if config.decoding.speculate == "lookup" else Lookahead(most)
        self._searches = Searches(self.scheduler, self._sampling, self._drafter)
        self.worker = Worker(self.runner) if ranks is None else TensorParallelWorker(self.runner, ranks)
        # One step ahead the model has a thread of its own: the engine works on one step while the next one runs.
        executor = LocalExecutor(self.worker, clock, self._drafter, threaded=steps.steps_ahead > 0)
        self._steps = Steps(self.scheduler, executor, self._sampling, clock, self._drafter)
        # Made when the first request asks for a form.
        self._grammars: Grammars | None = None
        self._live: dict[str, LiveRequest] = {}
        self.disk = self._disk_tier(open_store)
        if self.disk is not None:
            self._steps.on_ran = self.disk.keep
        self._undelivered = Undelivered()
        self._num_added = 0
        # Consecutive steps that ran out of memory.
        self._num_failures = 0
        self._prefetches = False

    def _disk_tier(self, open_store: OpenStore | None) -> DiskTier | None:
        """Make the tier below memory, on a folder or the caller's store; None: there is none."""
        memory, config = self.config.memory, self.config
        if memory.disk_cache is None and open_store is None:
            return None
        if isinstance(self.worker, TensorParallelWorker):
            raise InvalidConfig("open_store does not go with tensor_parallel_size: a rank has a part of each block.")
        if memory.disk_cache is not None and open_store is not None:
            raise InvalidConfig("disk_cache and open_store name two stores of blocks; name one.")
        if not memory.prefix_caching or config.decoding.speculate == "draft":
            raise InvalidConfig("open_store goes with prefix_caching, and not with a draft model.")
        layout, folder = self.manager.layout, memory.disk_cache
        if not layout.block_pages:
            raise UnsupportedByLayers("disk_cache (content on a disk)", "state layers alone")
        if layout.states and config.scheduling.steps_ahead:
            raise InvalidConfig(
                "disk_cache of a model with states does not go with steps_ahead: the next step may write over a state before it is copied."
            )
        invariant = config.model.is_invariant_on(self.model.device.type)
        identity, words = identity_of(self.runner, layout, batch_invariant=invariant)
        if folder is not None:
            # Imported here, because not every system has file locks.
            from paged.storage.disk_store import DiskStore

            # At most 10^18 bytes: more may overflow.
            limit = int(min(memory.disk_cache_gb or DISK_CACHE_GB, 1e9) * 1e9)

            def open_store(identity: bytes, num_bytes: int) -> BlockStore:
                return DiskStore(folder, limit_bytes=limit, block_bytes=num_bytes, identity=identity, words=words)

        assert open_store is not None, "one of them is there"
        page_bytes, states = self.pool.pages.page_bytes, None
        store = open_store(identity, layout.block_pages * page_bytes)
        if layout.states:
            try:
                states = open_store(sha256(identity + b"states").digest(), layout.state_pages * page_bytes)
            except BaseException:
                store.close()
                raise
        return DiskTier(store, self.scheduler, self.pool, self._live, self._clock, states)

    @property
    def manager(self) -> BlockManager:
        """The engine's memory, for observers."""
        return self.scheduler.manager

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is alive, an output is not handed out, or a prefetch waits for its step or the disk."""
        prefetches = self._prefetches or (self.disk is not None and self.disk.prefetches.is_busy)
        return bool(self._live or self._undelivered or prefetches)

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | SearchParams | None = None,
        *,
        id: str | None = None,
        arrival: float | None = None,
        priority: int = 0,
        salt: str | None = None,
        reads_cache: bool = True,
        writes_cache: bool = True,
        retention: Retention | None = None,
        tenant: str | None = None,
        session_id: str | None = None,
    ) -> str:
        """Add a request, and return its id. `prompt`: text, or token ids. `arrival`: a time of the clock, by default
        now. The other arguments are those of Request.

        Raises InvalidSampling, InvalidRequest (for the prompt, text without a tokenizer, or a search in a session),
        NeverFits, DuplicateRequest, or EngineInUse while another thread calls the engine.
        """
        with self.turns.beside("add_request"):
            self._steps.must_be_whole()
            params = SamplingParams() if params is None else params
            if not isinstance(params, SamplingParams | SearchParams):
                raise InvalidSampling(f"params have to be SamplingParams, or None; got {shown(params)}.")
            params.check(self.model.vocabulary_size)
            request_id = id if id is not None else self._new_id()
            if not isinstance(request_id, str):
                raise InvalidRequest(f"id has to be a non-empty string; got {shown(request_id)}.")
            if request_id in self._live or request_id in self._undelivered:
                raise DuplicateRequest(request_id)
            request = Request(
                id=request_id,
                prompt=self.encoded(prompt),
                max_tokens=params.max_tokens,
                priority=priority,
                salt=salt,
                reads_cache=reads_cache,
                writes_cache=writes_cache,
                retention=retention,
                tenant=tenant,
                session_id=session_id,
            )
            # A search computes candidates behind its last token: one token more.
            request = self._on_one_side(request, params.max_tokens + isinstance(params, SearchParams))
            text = prompt if isinstance(prompt, str) else None
            now = self._clock() if arrival is None else checked_time("arrival", arrival)
            if isinstance(params, SearchParams):
                if session_id is not None:
                    raise InvalidRequest(f'request "{request_id}": a search is not a turn of a session.')
                self._add_search(request, params, text, now)
            else:
                self._add_sampled(request, params, text, now)
            return request_id

    def _new_id(self) -> str:
        """Return an id that no request has."""
        ids = (f"request-{number}" for number in count(self._num_added))
        return next(each for each in ids if each not in self._live and each not in self._undelivered)

    def hint(self, hint: Hint) -> HintOutcome:
        """As Scheduler.hint, now; `tokens` may be text. The next `step` makes the copies of a prefetch. What only the
        disk has comes to free device blocks between later steps, once it is read; until then `has_unfinished`.

        Raises InvalidHint, InvalidRequest (text without a tokenizer), or EngineInUse while another thread calls the
        engine.
        """
        with self.turns.beside("hint"):
            self._steps.must_be_whole()
            if isinstance(hint, Hint) and hint.tokens is not None:
                hint = self._with_tokens(hint)
            outcome = self.scheduler.hint(hint, self._clock())
            self._prefetches |= hint.action == "prefetch" and outcome.num_tokens > 0
            return outcome if self.disk is None else self.disk.hinted(hint, outcome)

    def explain_prefix(self, prompt: str | Sequence[int], *, salt: str | None = None) -> PrefixExplanation:
        """As Scheduler.explain_prefix, of text or token ids; adds what the disk has. Raises InvalidRequest."""
        hint = self._with_tokens(Hint(action="prefetch", tokens=prompt, salt=salt))
        found = self.scheduler.explain_prefix(hint.tokens, salt=salt, extra_key=hint.extra_key)
        below = 0 if self.disk is None else self.disk.num_held(hint) - found.device_tokens - found.host_tokens
        if below <= 0:
            return found
        return msgspec.structs.replace(found, says=f"{found.says} {below:,} tokens more lie on the disk.")

    def _with_tokens(self, hint: Hint) -> Hint:
        """Return a hint of a prompt as the scheduler takes it. Raises InvalidRequest."""
        tokens, limit = self.encoded(hint.tokens), self.model.rotary_limit
        is_long = limit is not None and len(tokens) > limit and hint.extra_key is None
        return msgspec.structs.replace(hint, tokens=tokens, extra_key="long" if is_long else hint.extra_key)

    def session(self, session_id: str) -> SessionView:
        """As Scheduler.session."""
        return self.scheduler.session(session_id)

    def sessions(self, limit: int, prefix: str = "") -> list[SessionView]:
        """As Scheduler.sessions."""
        return self.scheduler.sessions(limit, prefix)

    def _on_one_side(self, request: Request, max_tokens: int) -> Request:
        """Return the request, marked to share K and V only with requests of the same rotary embedding. Raises
        InvalidRequest if `max_tokens` more tokens would change its embedding, and with it all of its K."""
        limit, length = self.model.rotary_limit, len(request.prompt)
        if limit is None:
            return request
        if length > limit:
            return msgspec.structs.replace(request, extra_key="long")
        most = limit + 1 - length
        if max_tokens > most:
            # The last token is not computed.
            raise InvalidRequest(
                f'request "{request.id}": a prompt of {length} tokens and max_tokens={request.max_tokens} cross {limit} tokens, where '
                "the model's rotary embedding changes for all tokens; a sequence has to stay on one side. max_tokens can be "
                f"{most - max_tokens + request.max_tokens} at most for this prompt; a prompt of more than {limit} tokens is on the other side."
            )
        return request

    def _add_sampled(self, request: Request, params: SamplingParams, text: str | None, now: float) -> None:
        ids, stops, bad_words = request.prompt, self._stops_of(params), self._encoded_words(params)
        reads_prompt, is_alone = params.prompt_logprobs is not None, params.num_sequences == 1
        request = msgspec.structs.replace(
            request,
            min_tokens=params.min_tokens,
            stop_token_ids=stops,
            num_sequences=params.num_sequences,
            # Several sequences share their prompt through the cache; in their own namespace they find nothing else.
            extra_key=(request.id, request.extra_key) if reads_prompt and not is_alone else request.extra_key,
            reads_cache=request.reads_cache and not (reads_prompt and is_alone),
        )
        if self.disk is not None:
            request = self.disk.with_loads(request, ids)
        form = params.structured_outputs
        # The scheduler refuses more.
        num = min(params.num_sequences, self.config.scheduling.max_sequences)
        grammars = [None if form is None else self._open_form(form) for _ in range(num)]
        seed = params.seed if params.seed is not None else seed_of(request.id, self.config.decoding.seed)
        live = LiveRequest(request.id, text, ids, params, now, self.model.tokenizer)
        with Uninterrupted():
            self.scheduler.add(request, now=now)
            self._num_added += 1
            self._live[request.id] = live
            for number, grammar in enumerate(grammars):
                lane = self._sampling.adjustments.open(params, ids, stops=stops, bad_words=bad_words, grammar=grammar)
                live.sequences.append(LiveSequence(live, number, seed_of_sequence(seed, number), lane))

    def _add_search(self, request: Request, params: SearchParams, text: str | None, now: float) -> None:
        if self.config.scheduling.steps_ahead:
            raise InvalidSampling(
                "a search does not go with steps_ahead: which sequences go on is known when a step has ended."
            )
        stops = self._stops_of(params)
        with Uninterrupted():
            max_tokens = self._searches.add(request, params, stops, now)
            self._num_added += 1
            as_sampled = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(params.stop_token_ids))
            self._live[request.id] = LiveRequest(
                request.id, text, request.prompt, as_sampled, now, self.model.tokenizer
            )

    def _stops_of(self, params: SamplingParams | SearchParams) -> tuple[int, ...]:
        return (*params.stop_token_ids, *(() if params.ignore_eos else self.model.eos_token_ids))

    def _deliver_search(self, found: Found) -> None:
        """Deliver the best hypotheses of a search that is over as its answers."""
        live, now = self._live.pop(found.request_id), self._clock()
        live.sequences = [LiveSequence(live, number, 0) for number in range(len(found.hypotheses))]
        news = []
        for sequence, (hypothesis, reason) in zip(live.sequences, found.hypotheses, strict=True):
            sequence.cumulative_logprob, sequence.score = hypothesis.logprob, hypothesis.score
            news.append(live.ended(sequence, list(hypothesis.tokens), reason, now, usage=found.usage))
        self._undelivered.add(news)

    def read_form(self, form: StructuredOutputsParams) -> None:
        """Read a form before `add_request` needs it: that may take seconds. A process of its own reads it first,
        because a stranger's form may bring a process down. Another thread may call this during steps. Raises
        MissingExtra; InvalidSampling for a form that cannot be followed; InvalidRequest if the tokenizer does not fit,
        or no token ends an answer."""
        if not isinstance(form, StructuredOutputsParams):
            raise InvalidSampling(f"form has to be StructuredOutputsParams; got {shown(form)}.")
        import_with_extra("paged.sampling.grammars", "StructuredOutputsParams").probe(form)
        self._open_form(form)

    def has_read(self, form: StructuredOutputsParams) -> bool:
        """Whether a form has been read, and is kept."""
        return self._grammars is not None and form in self._grammars

    def _open_form(self, form: StructuredOutputsParams) -> Grammar:
        """Return the beginning of an answer in this form. Raises as `read_form`."""
        model = self.model
        if model.tokenizer is None or not model.eos_token_ids:
            lacks = "tokenizer" if model.tokenizer is None else "token that ends an answer"
            raise InvalidRequest(f"{model.path}: no {lacks} there, so structured_outputs cannot be followed.")
        if self._grammars is None:
            home = import_with_extra("paged.sampling.grammars", "StructuredOutputsParams")
            try:
                self._grammars = home.Grammars(model.tokenizer, model.vocabulary_size, model.eos_token_ids)
            except ValueError as error:
                raise InvalidRequest(
                    f"{model.path}: structured_outputs cannot be followed with its tokenizer: {short_cause(error)}"
                ) from error
        found: Grammar = self._grammars.open(form)
        return found

    def _encoded_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the bad words as token ids, text both as it is and behind a space. Raises InvalidRequest for bad words
        or stop strings in text if there is no tokenizer."""
        tokenizer, found = self.model.tokenizer, []
        if tokenizer is None and (params.stop or any(isinstance(word, str) for word in params.bad_words)):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequest(f"{self.model.path}: no tokenizer there, so {name} cannot be text.")
        for word in params.bad_words:
            if isinstance(word, str):
                plain = tokenizer.encode(checked_text(word), add_special_tokens=False)
                spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
                found += [list(each) for each in {tuple(plain), tuple(spaced)} if each]
            else:
                found.append([int(token) for token in word])
        return found

    def encoded(self, prompt: str | Sequence[int]) -> list[int]:
        """Return a prompt as token ids. Raises InvalidRequest if it is neither text nor token ids, and for text if the
        model has no tokenizer."""
        if not isinstance(prompt, str):
            return checked_tokens(prompt)
        if self.model.tokenizer is None:
            raise InvalidRequest(f"{self.model.path}: no tokenizer there, so prompts have to be token ids.")
        found: list[int] = self.model.tokenizer.encode(checked_text(prompt), verbose=False)
        return found

    def abort(self, request_id: str) -> EngineOutput | None:
        """End a request in any state. Return its last output, joined with all that had not been handed out.

        None if the request has ended, and its end was handed out or comes with the next step. Raises UnknownRequest, or
        EngineInUse while another thread calls the engine.
        """
        with self.turns.beside("abort"), Uninterrupted():
            self._must_be_no_branch(request_id)
            if request_id in self._searches:
                self._end_search(request_id, "abort")
                return self._undelivered.take_joined(request_id)
            return self._ended(request_id, self.scheduler.abort(request_id), "abort")

    def finish(self, request_id: str, reason: str = "stop") -> EngineOutput | None:
        """As `abort`, with "stop" or "length" as the reason, for example when its text calls a tool. Raises
        InvalidRequest for another reason, too."""
        with self.turns.beside("finish"), Uninterrupted():
            self._must_be_no_branch(request_id)
            if request_id in self._searches:
                self._searches.finish_best(request_id, reason)
                self._end_search(request_id, reason)
                return self._undelivered.take_joined(request_id)
            output, live = self.scheduler.finish(request_id, reason=reason), self._live.get(request_id)
            for sequence in range(1, len(live.sequences) if live else 0):
                output = self.scheduler.finish(request_id, sequence, reason) or output
            return self._ended(request_id, output, reason)

    def step(self) -> list[EngineOutput]:
        """Run one forward pass. Return its outputs, and those that earlier steps could not return, in order for each
        request.

        A step that runs out of memory is taken back and tried again; if it fails too often, its requests end with
        "error". A request whose logits are no numbers ends so at once, alone. Other errors, of the model, a callback or
        Ctrl-C, are raised as they are: the batch is cancelled, nothing is lost, and the next step begins again.

        Raises EngineFailed if copies fail: every request has ended with "error" then, and the cache is empty; and in
        each later step if an error left the scheduler's books half-written. If a rank fails, raises RanksFailed
        likewise, and in each later step. Raises EngineInUse within a callback, and while another thread calls the
        engine.
        """
        with self.turns.alone("step"):
            self.advance()
            return self._undelivered.take_all()

    def advance(self) -> None:
        """As `step`, for a caller that has the turn; the outputs stay in the engine, for `outputs_of`."""
        self._steps.must_be_whole()
        ended: list[Batch] = []
        try:
            failed = self._run_step(ended)
        except BaseException as error:
            self._recover(error)
            self._tell_of(ended)
            raise
        if ended:
            self._num_failures = 0
        self._prefetches = self._prefetches and self.scheduler.has_unfinished
        if failed is not None:
            self._end_failed(failed)
        self._tell_of(ended)

    def _tell_of(self, ended: list[Batch]) -> None:
        """Tell searches and `on_batch` that these batches have ended."""
        for batch in ended:
            if self._searches:
                with Uninterrupted():
                    for found in self._searches.ended(batch):
                        self._deliver_search(found)
            if self.on_batch is not None:
                self.on_batch(batch)

    def _run_step(self, ended: list[Batch]) -> FailedBatch | None:
        """Launch a batch, end those that may end, and add them to `ended`. Return a batch that had to be cancelled."""
        steps, disk = self._steps, self.disk
        if disk is not None:
            disk.take_arrived()
        is_idle = not steps.num_outstanding
        is_launched = steps.launch(self._note_admitted, self.on_logits)
        if disk is not None and is_idle and not is_launched and disk.is_loading:
            disk.wait()
        # A batch that lists loads ends at once, so that they begin; so does one before prefetched blocks are written.
        stays = is_launched and not len(steps.latest.loads) and not (disk is not None and disk.prefetches.has_read)
        # One step ahead the latest batch stays out, unless no request is left that could need it.
        while steps.num_outstanding > (self.config.scheduling.steps_ahead if stays else 0) or not self._live:
            found = steps.finish(self._deliver)
            if found is None:
                break
            if isinstance(found, FailedBatch):
                return found
            ended.append(found)
            if disk is not None and len(found.loads):
                disk.begin(found)
        return steps.settle()

    def close(self) -> None:
        """Wait for a running step, take it back, and end what runs the model, other ranks included. A disk cache writes
        what it has taken. Live requests can still be aborted; what needs the model raises EngineClosed. An engine
        without a reference closes itself. Raises EngineInUse in a callback, or while another thread calls the
        engine."""
        with self.turns.alone("close"):
            self._steps.close()
            if isinstance(self.worker, TensorParallelWorker):
                self.worker.ranks.end("its engine was closed")
            if self.disk is not None:
                self.disk.close()

    def outputs_of(self, request_ids: Collection[str]) -> Iterator[EngineOutput]:
        """Yield the outputs of these requests that have not been handed out; each is handed out when it is read."""
        return self._undelivered.take_each(request_ids)

    def forget(self, request_ids: Collection[str]) -> None:
        """Abort those of the requests that live, and drop their outputs that have not been handed out. Raises
        InvalidRequest if these are no ids."""
        # One id is no list: each of its characters would count.
        is_list = isinstance(request_ids, Collection) and not isinstance(request_ids, str)
        if not is_list or not all(isinstance(each, str) for each in request_ids):
            raise InvalidRequest(f"request_ids has to be a list of ids; got {shown(request_ids)}.")
        with Uninterrupted():
            for request_id in request_ids:
                if request_id in self._live:
                    self.abort(request_id)
                # If it has ended, its last output may still come.
                live = self._live.pop(request_id, None)
                if live is not None:
                    self._all_ended(live, "abort", usage=None)
                self._undelivered.take_joined(request_id)

    def stats(self) -> EngineStats:
        """Return the totals so far."""
        return self._steps.stats()

    def check(self) -> list[str]:
        """Return each violated invariant of scheduler and memory as a sentence (docs/invariants.md); none: empty."""
        return self.scheduler.check()

    def live_request(self, request_id: str) -> LiveRequest | None:
        """Return the record of a request that has not ended, for observers; None for others."""
        return self._live.get(request_id) if isinstance(request_id, str) else None

    def _end_search(self, request_id: str, reason: str, error: str | None = None) -> None:
        """End a search from outside, without an answer."""
        usage = self._searches.end(request_id)
        live = self._live.pop(request_id)
        live.sequences = [LiveSequence(live, 0, 0)]
        self._undelivered.add(live.ended_all(reason, self._clock(), usage=usage, error=error))

    def _must_be_no_branch(self, request_id: str) -> None:
        """Raise UnknownRequest for a search's branch, which is a request of the scheduler's alone."""
        if not isinstance(request_id, str):
            raise UnknownRequest(shown(request_id))
        if self._searches.owner_of(request_id) not in (None, request_id):
            raise UnknownRequest(request_id)

    def _ended(self, request_id: str, output: Output | None, reason: str) -> EngineOutput | None:
        """Return what is handed out of a request that the caller ended; `output` is the scheduler's last one of it."""
        # Without an output the request has ended by itself: keep it until its end is delivered.
        live = None if output is None else self._live.pop(request_id, None)
        if output is not None and live is not None:
            self._undelivered.add(self._all_ended(live, reason, usage=output.usage))
        return self._undelivered.take_joined(request_id)

    def _all_ended(
        self, live: LiveRequest, reason: str, *, usage: RequestUsage | None, error: str | None = None
    ) -> list[EngineOutput]:
        """End the sequences of a request that go on, and return their last outputs."""
        for sequence in live.live:
            self._sampling.adjustments.close(sequence.lane)
        return live.ended_all(reason, self._clock(), usage=usage, error=error)

    def _note_admitted(self, batch: Batch) -> None:
        """Note how each admitted row is sampled."""
        for request_id in batch.admitted:
            live = self._live.get(request_id)
            if self._searches.admitted(request_id) or live is None:
                continue
            for sequence in live.live:
                row = self.scheduler.row_of(request_id, sequence.number)
                if row >= 0:
                    self._sampling.set(
                        row,
                        live.params,
                        seed=sequence.seed,
                        prompt_len=len(live.prompt_ids),
                        lane=sequence.lane,
                        reader=sequence,
                    )
                    if self._drafter is not None:
                        self._drafter.begin(row)

    def _deliver(self, outputs: Outputs) -> None:
        now, live_ones = self._clock(), self._live
        news: list[EngineOutput] = []
        tokens, end = outputs.token_ids.tolist(), 0
        each = zip(
            outputs.ids.tolist(),
            outputs.sequences.tolist(),
            outputs.counts.tolist(),
            outputs.finish.tolist(),
            strict=True,
        )
        for place, (request_id, number, num, finish) in enumerate(each):
            start, end = end, end + num
            live = live_ones.get(request_id)
            # Most rows of most steps: make no object but the output.
            if live is not None and num and not finish and live.sequences:
                sequence = live.sequences[number]
                if sequence.is_plain and sequence.finish_reason is None:
                    given = tokens[start:end]
                    text = sequence.add_plain(given, now)
                    news.append(EngineOutput(request_id, given, text, None, None, None, None, number))
                    continue
            reason, usage = FINISH_REASONS[finish], outputs.usage.get(place)
            self._deliver_one(Output(request_id, number, tokens[start:end], reason, usage), now, news)
        for output in outputs.others:
            self._deliver_one(output, now, news)
        self._undelivered.add(news)

    def _deliver_one(self, output: Output, now: float, news: list[EngineOutput]) -> None:
        """Take the news of a sequence, and add what is handed out to `news`."""
        live = self._live.get(output.id)
        if self._is_of_a_search(output) or live is None:
            return
        sequence = live.sequences[output.sequence]
        if sequence.finish_reason is not None:
            return
        if output.finish_reason is None:
            news.append(self._grown(live, sequence, output.token_ids, now))
        elif output.finish_reason == "rejected":
            news += self._all_ended(live, "rejected", usage=output.usage)
        else:
            self._sampling.adjustments.close(sequence.lane)
            news.append(live.ended(sequence, output.token_ids, output.finish_reason, now, usage=output.usage))
        if live.last is not None:
            del self._live[output.id]

    def _is_of_a_search(self, output: Output) -> bool:
        """End a search whose branch was ended. Return whether the output is of a branch."""
        owner = self._searches.owner_of(output.id)
        if owner is not None and output.finish_reason is not None:
            self._end_search(owner, output.finish_reason)
        return owner is not None

    def _grown(self, live: LiveRequest, sequence: LiveSequence, tokens: list[int], now: float) -> EngineOutput:
        """Take new tokens of a sequence; end it if a stop string has come with them."""
        grown = live.grown(sequence, tokens, now)
        if not sequence.has_found_stop:
            return grown
        ended = self.scheduler.finish(live.id, sequence.number, "stop")
        self._sampling.adjustments.close(sequence.lane)
        last = live.ended(sequence, [], "stop", now, usage=None if ended is None else ended.usage)
        return msgspec.structs.replace(last, token_ids=grown.token_ids, text=grown.text, logprobs=grown.logprobs)

    def _end_failed(self, failed: FailedBatch) -> None:
        """End the requests of a batch that was cancelled, unless another try may help."""
        if not isinstance(failed.error, BadLogits | CannotAdjust):
            self._num_failures += 1
            if self._num_failures <= self.config.scheduling.max_retries:
                return
            self._num_failures = 0
        self._end_with_error(failed.request_ids, failed.error)

    def _recover(self, error: BaseException) -> None:
        """Cancel all outstanding batches. If copies failed, end every request and forget the cache."""
        with Uninterrupted():
            self._steps.take_back()
            if self._steps.content_is_lost:
                self._end_with_error(list(self._live), error)
                self._steps.forget_lost_content()

    def _end_with_error(self, request_ids: Iterable[str], error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        with Uninterrupted():
            for request_id in request_ids:
                owner = self._searches.owner_of(request_id)
                if owner is not None:
                    self._end_search(owner, "error", reason)
                    continue
                live = self._live.pop(request_id, None)
                if live is None:
                    continue
                output = self.scheduler.abort(request_id)
                usage = output.usage if output is not None else None
                self._undelivered.add(self._all_ended(live, "error", usage=usage, error=reason))


def _loaded(config: EngineConfig) -> tuple[LoadedModel, Ranks | None]:
    """Load the model, and start the other ranks if it is split. Raises as `load_model` and `load_split`."""
    its, given = config.model, named_or_shipped(config.model.model)
    if isinstance(given, LoadedModel):
        _check_loaded_so(config, given)
        return given, None
    if config.memory.block_size is not None:
        # Before weights are read.
        block_size_of(config, strides_of(config_of(Path(given))), given)
    if its.tensor_parallel_size > 1:
        return load_split(Path(given), its.tensor_parallel_size, dtype=its.dtype, device=its.device)
    return load_model(
        given,
        dtype=its.dtype,
        device=its.device,
        quantization=its.quantization,
        quantize_head=its.quantize_head,
    ), None


def _runner(config: EngineConfig, model: LoadedModel, pool: LayeredPool, ranks: Ranks | None) -> Runner:
    """Make a model's runner, and that of each other rank if it is split."""
    its, kept = config.model, config.memory
    is_invariant = its.is_invariant_on(model.device.type)
    # Sums over ranks cannot be captured in a graph.
    ours = partial(
        runner_for,
        model,
        pool,
        backend=its.backend,
        batch_invariant=is_invariant,
        enforce_eager=its.enforce_eager or ranks is not None,
    )
    if ranks is None:
        return ours()
    is_planned = not isinstance(pool, KVPool)
    asked = Make(
        num_blocks=pool.num_blocks,
        host_blocks=pool.num_host_blocks,
        block_size=pool.block_size,
        is_planned=is_planned,
        kv_cache_dtype=kept.kv_cache_dtype,
        kv_cache_dtype_skip_layers=kept.kv_cache_dtype_skip_layers,
        backend=its.backend,
        batch_invariant=is_invariant,
    )
    return ranks.make(asked, ours)


def _check_loaded_so(config: EngineConfig, model: LoadedModel) -> None:
    """Raise InvalidConfig if a dtype, a device, a quantization or ranks are named that a loaded model does not have."""
    its, dtype = config.model, str(model.dtype).removeprefix("torch.")
    # "cpu" is the default of `device`.
    for name, named, loaded in (
        ("dtype", its.dtype, ("auto", dtype)),
        ("device", its.device, ("cpu", model.device.type, str(model.device))),
    ):
        if named not in loaded:
            raise InvalidConfig(
                f'{name}="{named}" is chosen at load, and {model.path} is loaded already, with {name}="{loaded[-1]}"; name it to load_model.'
            )
    if its.tensor_parallel_size > 1:
        raise InvalidConfig(
            f"tensor_parallel_size={its.tensor_parallel_size}: a model is split while it is loaded, and {model.path} is loaded already; name its folder."
        )
    if its.quantization not in (None, model.quantization) or (its.quantize_head and not model.quantize_head):
        raise InvalidConfig(
            f'quantization="{its.quantization}" is made at load, and {model.path} is loaded already, with '
            f"quantization={model.quantization!r}; name it to load_model."
        )


def _longest(named: int | None, most: int | None) -> int | None:
    """Return the most tokens of a sequence; None: what the pool holds. Raises InvalidConfig beyond the model's."""
    if named is not None and most is not None and named > most:
        raise InvalidConfig(f"max_model_len {named} is beyond the model's {most} tokens.")
    return most if named is None else named
