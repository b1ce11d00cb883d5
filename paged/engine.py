"""The step loop: schedule, copy, forward, sample, update, text.

Knows all three rooms and one model. Does not know where requests come from or who reads the answers. Time comes in as a clock,
randomness as a seed a request. Calls are serialised by the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from block_manager import BlockManager, InvalidConfig, PagedError
from paged.live_request import LiveRequest, RowSampling
from paged.model.capacity import blocks_within, bytes_per_block, pool_for
from paged.model.costs import measured_costs
from paged.model.loading import LoadedModel, load_model
from paged.model.runner import runner_for
from paged.results import EngineOutput, EngineStats
from paged.sampling.params import SamplingParams
from paged.sampling.sampler import sample, seed_of
from scheduler import Batch, Costs, DuplicateRequest, InvalidRequest, Outputs, Request, Retention, Scheduler

# Bytes for K and V when neither blocks nor bytes are named.
DEFAULT_KV_BYTES = 256 * 2**20


class EngineFailed(PagedError, RuntimeError):
    """The copies of a step failed midway: what the pool holds is not known any more."""


class Engine:
    """Runs requests on one model, whose KV lives in a pool of blocks.

    model               a LoadedModel, or a checkpoint folder
    num_blocks          device blocks; None: as many as kv_cache_bytes hold (default 256 MiB, or what all sequences can need)
    host_blocks         host blocks to swap to
    host_caching        content that leaves the device is kept in host blocks, and comes back on a hit
    costs               what copying and computing cost, a Costs; "measured": timed here, at the start; None: the usual ones
    max_chunk           prompt tokens of one sequence in a step, at most; None: what the step has room for
    max_model_len       tokens of one sequence; None: what the model and the pool allow
    backend             how attention is computed, see attention.known_backends(); "auto": the fastest that can do it here
    batch_invariant     an answer depends on nothing but its request; off: faster, and words may differ under load
    dtype               "auto" (float32 on a CPU), "float32", "bfloat16" or "float16"
    seed                of requests that name none, with their id
    clock               seconds
    max_retries         how often a step that failed is tried again before its requests end with "error"

    Raises ModelError, BudgetTooSmall, InvalidConfig, UnknownPolicy, and attention's UnknownBackend or UnsupportedByBackend.
    """

    def __init__(
        self,
        model: LoadedModel | str | Path,
        *,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        block_size: int = 16,
        host_blocks: int = 0,
        policy: str = "paged",
        max_tokens_per_step: int = 256,
        max_sequences: int = 32,
        max_chunk: int | None = None,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        host_caching: bool = False,
        costs: Costs | Literal["measured"] | None = None,
        backend: str = "auto",
        batch_invariant: bool = True,
        dtype: str = "auto",
        device: str = "cpu",
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        max_retries: int = 2,
    ) -> None:
        self.model = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype, device=device)
        if num_blocks is not None and kv_cache_bytes is not None:
            raise InvalidConfig("num_blocks and kv_cache_bytes say the same thing twice; name one.")
        longest = max_model_len if max_model_len is not None else self.model.max_length
        if max_model_len is not None and self.model.max_length is not None and max_model_len > self.model.max_length:
            raise InvalidConfig(f"max_model_len {max_model_len} is beyond the model's {self.model.max_length} tokens.")
        if num_blocks is None:
            if block_size < 1:
                raise InvalidConfig(f"block_size has to be at least 1; got {block_size}.")
            if kv_cache_bytes is not None:
                num_blocks = blocks_within(self.model, kv_cache_bytes, block_size, max_model_len or 1)
            else:
                num_blocks = self._default_blocks(block_size, longest, max_sequences)
        manager = BlockManager(
            num_blocks,
            block_size,
            host_blocks=host_blocks,
            prefix_caching=prefix_caching,
            host_caching=host_caching,
        )
        if isinstance(costs, str) and costs != "measured":
            raise InvalidConfig(f'costs has to be a Costs, "measured" or None; got {costs!r}.')
        self.pool = pool_for(self.model, num_blocks=num_blocks, block_size=block_size, num_host_blocks=host_blocks)
        manager.must_fit(self.pool)
        self.runner = runner_for(self.model, self.pool, backend=backend, batch_invariant=batch_invariant)
        self.scheduler = Scheduler(
            manager,
            policy=policy,
            max_tokens_per_step=max_tokens_per_step,
            max_sequences=max_sequences,
            max_chunk=max_chunk,
            max_model_len=longest,
            vocabulary_size=self.model.vocabulary_size,
            costs=measured_costs(self.runner, clock) if costs == "measured" else costs,
        )
        # For those who watch: called with a request's id, how many of its tokens were chosen before, and the logits, float32
        # [vocabulary], that one is chosen from now. A step that failed calls it again for the same tokens.
        self.on_logits: Callable[[str, int, Tensor], None] | None = None
        # Called with each batch that ran, after its update; not with one that failed.
        self.on_batch: Callable[[Batch], None] | None = None
        self._seed = seed
        self._clock = clock
        self._max_retries = max_retries
        self._live: dict[str, LiveRequest] = {}
        self._sampling = RowSampling()
        self._num_added = 0
        self._failures = self._failed_steps = self._steps = self._output_tokens = 0
        self._host_s = self._model_s = 0.0

    def _default_blocks(self, block_size: int, longest: int | None, max_sequences: int) -> int:
        room = max(1, DEFAULT_KV_BYTES // bytes_per_block(self.model, block_size))
        return room if longest is None else min(room, max_sequences * -(-longest // block_size))

    @property
    def manager(self) -> BlockManager:
        """Its memory; for those who watch."""
        return self.scheduler.manager

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is alive."""
        return bool(self._live)

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        arrival: float | None = None,
        priority: int = 0,
        salt: str | None = None,
        reads_cache: bool = True,
        writes_cache: bool = True,
        retention: Retention | None = None,
    ) -> str:
        """Take a request; returns its id. `prompt` is text, or token ids. `arrival` is a time of the clock, default: now. What is said
        of the cache is the Request's.

        Raises InvalidSampling, InvalidRequest (ids outside the vocabulary, text without a tokenizer), NeverFits or DuplicateRequest.
        """
        params = params or SamplingParams()
        params.check(self.model.vocabulary_size)
        request_id = id if id is not None else f"request-{self._num_added}"
        if request_id in self._live:
            raise DuplicateRequest(request_id)
        ids = self.encoded(prompt)
        now = self._clock() if arrival is None else arrival
        eos = () if params.ignore_eos else self.model.eos_token_ids
        request = Request(
            id=request_id,
            prompt=ids,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=(*params.stop_token_ids, *eos),
            priority=priority,
            salt=salt,
            reads_cache=reads_cache,
            writes_cache=writes_cache,
            retention=retention,
        )
        self.scheduler.add(request, now=now)
        self._num_added += 1
        seed = params.seed if params.seed is not None else seed_of(request_id, self._seed)
        self._live[request_id] = LiveRequest(
            request_id, prompt if isinstance(prompt, str) else None, ids, params, seed, now, self.model.tokenizer
        )
        return request_id

    def encoded(self, prompt: str | Sequence[int]) -> list[int]:
        """A prompt as token ids. Raises InvalidRequest for text when the model has no tokenizer."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.model.tokenizer is None:
            raise InvalidRequest(f"{self.model.path}: no tokenizer there, so prompts have to be token ids.")
        found: list[int] = self.model.tokenizer.encode(prompt, verbose=False)
        return found

    def abort(self, request_id: str) -> EngineOutput | None:
        """End a request in whatever state it is; its last output, None if it has ended. Raises UnknownRequest."""
        output = self.scheduler.abort(request_id)
        live = self._live.pop(request_id, None)
        if output is None or live is None:
            return None
        return live.ended([], "abort", self._clock(), usage=output.usage)

    def step(self) -> list[EngineOutput]:
        """One forward pass; what it brought, a request an output.

        A step that fails is taken back and tried again; when it fails once too often its requests end with "error". Raises
        EngineFailed when its copies fail.
        """
        began = self._clock()
        batch = self.scheduler.schedule(began)
        if batch.is_empty:
            return []
        self._note_admitted(batch)
        try:
            self.runner.move(batch)
        except Exception as error:
            raise EngineFailed(f"step {batch.number}: the copies failed: {error}") from error
        forward = self._clock()
        try:
            logits = self.runner.logits(batch)
            computed = self._clock()
            tokens = self._sampled(batch, logits)
        except Exception as error:
            self.scheduler.cancel(batch, moved=True)
            return self._retried(batch, error)
        self._failures = 0
        outputs = self.scheduler.update(batch, tokens, now=computed)
        news = self._news(outputs)
        if self.on_batch is not None:
            self.on_batch(batch)
        self._steps += 1
        self._output_tokens += len(tokens)
        done = self._clock()
        self._model_s += computed - forward
        self._host_s += (done - computed) + (forward - began)
        return news

    def stats(self) -> EngineStats:
        """Totals so far."""
        return EngineStats(
            steps=self._steps,
            failed_steps=self._failed_steps,
            output_tokens=self._output_tokens,
            host_s=self._host_s,
            model_s=self._model_s,
        )

    def check(self) -> list[str]:
        """Every violated invariant of scheduler and memory as a sentence (docs/invariants.md); empty when there is none."""
        return self.scheduler.check()

    def live_request(self, request_id: str) -> LiveRequest | None:
        """What is kept of a request that has not ended; for those who watch."""
        return self._live.get(request_id)

    def _note_admitted(self, batch: Batch) -> None:
        """How each row that somebody was given is sampled."""
        for request_id in batch.admitted:
            live = self._live.get(request_id)
            if live is not None:
                for row in self.scheduler.rows_of(request_id):
                    self._sampling.set(row, live)

    def _sampled(self, batch: Batch, logits: Tensor) -> NDArray[np.int32]:
        """int32 [rows that sample]."""
        rows = batch.rows[batch.samples]
        if not len(rows):
            return np.empty(0, np.int32)
        columns = self._sampling
        places = batch.seq_lens[batch.samples] - columns.prompt_len[rows]
        if self.on_logits is not None:
            for request_id, place, row in zip(batch.ids[batch.samples].tolist(), places.tolist(), logits, strict=True):
                self.on_logits(request_id, place, row)
        return sample(
            logits,
            temperature=columns.temperature[rows],
            top_k=columns.top_k[rows],
            top_p=columns.top_p[rows],
            seeds=columns.seed[rows],
            places=places,
        )

    def _news(self, outputs: Outputs) -> list[EngineOutput]:
        now, news = self._clock(), []
        for output in outputs:
            live = self._live.get(output.id)
            if live is None:
                continue
            if output.finish_reason is None:
                news.append(live.grown(output.token_ids, now))
            else:
                del self._live[output.id]
                news.append(live.ended(output.token_ids, output.finish_reason, now, usage=output.usage))
        return news

    def _retried(self, batch: Batch, error: Exception) -> list[EngineOutput]:
        self._failed_steps += 1
        self._failures += 1
        if self._failures <= self._max_retries:
            return []
        self._failures = 0
        reason = f"{type(error).__name__}: {error}"
        news = []
        for request_id in dict.fromkeys(batch.ids.tolist()):
            live = self._live.pop(request_id, None)
            if live is not None:
                output = self.scheduler.abort(request_id)
                usage = output.usage if output is not None else None
                news.append(live.ended([], "error", self._clock(), usage=usage, error=reason))
        return news
