"""vLLM's whole scheduler, with its KV cache manager, behind the names of the kit's `StepScheduler`, and a machine to drive it.

What one step runs is made here from `SchedulerOutput` alone, as vLLM's model runner does it: it keeps each request's tokens and block
ids, takes the differences that it gets, and computes the slots. So a difference that is sent wrongly is a wrong slot or a wrong
table. Left to vLLM's front end, and therefore done here: prompts that cannot fit are refused, and so is an id that is still in use.
One batch outstanding, no drafts, no connector. First come first served, or by priority. Knows no model.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from conformance.vllm.manager import CAPABILITIES, Row, VllmManager, pool_of, request_of, salt_of, vllm_names
from paged import Moves, Output
from paged.errors import DuplicateRequest, NeverFits, UnknownRequest
from paged.testing.books import namespace_of
from paged.testing.cache_view import content_namespace
from paged.testing.world import World

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 65536,
}
"""vLLM's configuration wants a model's; weights are never looked for."""


@cache
def _configuration() -> Any:
    """A VllmConfig, made once: copies of it take each world's sizes."""
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=folder, dtype="bfloat16", max_model_len=65536, skip_tokenizer_init=True)
        limits = SchedulerConfig(
            max_model_len=65536,
            is_encoder_decoder=False,
            max_num_seqs=8,
            max_num_batched_tokens=65536,
            enable_chunked_prefill=True,
            async_scheduling=False,
        )
        cache_limits = CacheConfig(block_size=16, enable_prefix_caching=True)
        return VllmConfig(model_config=model, scheduler_config=limits, cache_config=cache_limits)


def scheduler_of(world: World, policy: str) -> Any:
    """vLLM's Scheduler with a world's sizes; its configuration is a copy of its own."""
    vllm_names()
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    configuration = copy.copy(_configuration())
    for part in ("model_config", "scheduler_config", "cache_config"):
        setattr(configuration, part, copy.copy(getattr(configuration, part)))
    configuration.model_config.max_model_len = world.longest
    configuration.scheduler_config.max_model_len = world.longest
    configuration.scheduler_config.max_num_seqs = world.max_sequences
    configuration.scheduler_config.max_num_batched_tokens = world.max_tokens_per_step
    configuration.scheduler_config.policy = policy
    configuration.cache_config.block_size = world.block_size
    configuration.cache_config.enable_prefix_caching = world.prefix_caching
    configuration.cache_config.num_gpu_blocks = world.num_blocks + 1
    return Scheduler(
        vllm_config=configuration,
        kv_cache_config=pool_of(world.num_blocks, world.block_size),
        structured_output_manager=StructuredOutputManager(configuration),
        block_size=world.block_size,
        hash_block_size=world.block_size,
        log_stats=False,
    )


@dataclass
class Runner:
    """What vLLM's model runner keeps of one request, learned from SchedulerOutput and from what it sampled itself."""

    tokens: list[int]
    blocks: list[int]
    row: int


class VllmScheduler:
    """`policy` is vLLM's: "fcfs" does not look at priorities, "priority" does."""

    capabilities = CAPABILITIES

    def __init__(self, world: World, policy: str = "fcfs") -> None:
        self.world = world
        self.policy = policy
        self.core = scheduler_of(world, policy)
        self.manager = VllmManager(
            world.num_blocks,
            world.block_size,
            prefix_caching=world.prefix_caching,
            core=self.core.kv_cache_manager,
        )
        self.namespaces: dict[str, Any] = {}
        self.rows: dict[str, int] = {}
        self.runners: dict[str, Runner] = {}
        self.outstanding: set[str] = set()
        self.ended: dict[str, str] = {}
        self.tally: Counter[str] = Counter()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.core.get_num_unfinished_requests())

    def add(self, request: Any, now: float = 0.0) -> None:
        """Raises what vLLM's front end raises for a prompt over the model's limit, as NeverFits, and for an id in use."""
        from vllm.sampling_params import SamplingParams

        if request.id in self.core.requests or request.id in self.outstanding:
            raise DuplicateRequest(request.id)
        self.tally["submitted"] += 1
        if len(request.prompt) >= self.core.max_model_len:
            self.tally["rejected"] += 1
            self.ended[request.id] = "rejected"
            raise NeverFits(
                "prompt over the limit", needed=len(request.prompt) + 1, limit=self.core.max_model_len, unit="tokens"
            )
        sampling = SamplingParams(
            max_tokens=request.max_tokens, stop_token_ids=list(request.stop_token_ids), temperature=0.0
        )
        sampling._eos_token_id = request.eos_token_id
        namespace = content_namespace(namespace_of(request))
        made = request_of(
            request.id,
            request.prompt,
            self.world.block_size,
            self.world.prefix_caching,
            sampling_params=sampling,
            arrival_time=now,
            priority=request.priority,
            cache_salt=salt_of(namespace),
        )
        self.namespaces[request.id] = namespace
        self.ended.pop(request.id, None)
        self.core.add_request(made)

    def schedule(self, now: float = 0.0) -> Any:
        """One step, as the model runner would run it."""
        out = self.core.schedule()
        before = {id: list(runner.blocks) for id, runner in self.runners.items()}
        for id in [*out.finished_req_ids, *(out.preempted_req_ids or ())]:
            self.rows.pop(id, None)
        for id in out.finished_req_ids:
            self.runners.pop(id, None)
        computed = self._apply(out)
        changes = [
            (self.rows[id], column, block)
            for id in out.num_scheduled_tokens
            for column, block in enumerate(self.runners[id].blocks)
            if column >= len(before.get(id, ())) or before[id][column] != block or id not in self.manager_ids()
        ]
        self.sync()
        self.outstanding = set(out.num_scheduled_tokens)
        batch = self._batch(out, computed, changes)
        # The kit asks what is there, and means: has been computed. vLLM's table tells what is there or is being computed.
        self.manager.unconfirmed = set((batch.slot_mapping // self.world.block_size).tolist())
        return batch

    def update(self, batch: Any, token_ids: Any, counts: Any = None, now: float = 0.0) -> list[Output]:
        """Sampled tokens back to vLLM, one for each row that samples."""
        from vllm.v1.outputs import ModelRunnerOutput

        if not batch.out.num_scheduled_tokens:
            return []
        ids, tokens = list(batch.out.num_scheduled_tokens), iter(token_ids.tolist())
        sampled = [[next(tokens)] if samples else [] for samples in batch.samples.tolist()]
        for id, new in zip(ids, sampled, strict=True):
            if id in self.runners:
                self.runners[id].tokens += new
        answer = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={id: index for index, id in enumerate(ids)}, sampled_token_ids=sampled
        )
        outputs = [
            output for each in self.core.update_from_output(batch.out, answer).values() for output in each.outputs
        ]
        self.outstanding = set()
        self.manager.unconfirmed = set()
        for output in outputs:
            if output.finish_reason is not None:
                self._end(output.request_id, "finished")
        self.sync()
        return [
            Output(o.request_id, 0, list(o.new_token_ids), None if o.finish_reason is None else str(o.finish_reason))
            for o in outputs
        ]

    def abort(self, id: str, /) -> Output | None:
        from vllm.v1.request import RequestStatus

        if id not in self.core.requests:
            if id not in self.ended:
                raise UnknownRequest(id)
            return None
        self.core.finish_requests(id, RequestStatus.FINISHED_ABORTED)
        self._end(id, "aborted")
        self.sync()
        return Output(id, 0, [], "abort")

    def status(self, id: str, /) -> str:
        request = self.core.requests.get(id)
        if request is None:
            return self.ended[id]
        return "running" if request.status.name == "RUNNING" else "waiting"

    def explain(self, id: str) -> Any:
        """vLLM has no such question; the state alone."""
        return SimpleNamespace(status=self.status(id))

    def id_of(self, row: int, /) -> str | None:
        return next((id for id, number in self.rows.items() if number == row), None)

    def counts(self) -> dict[str, int]:
        running, waiting = self.core.get_request_counts()
        states = dict.fromkeys(("loading", "paused", "swapped", "finished", "rejected", "aborted", "submitted"), 0)
        return {**states, **self.tally, "running": running, "waiting": waiting}

    def waiting_ids(self) -> list[str]:
        return [request.request_id for request in self.core.waiting]

    def check(self) -> list[str]:
        """The manager's, and that exactly the running requests hold blocks."""
        held = self.core.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        running = {request.request_id for request in self.core.running}
        found = [
            f"{id} is not running and holds {blocks}" for id, blocks in held.items() if blocks and id not in running
        ]
        return found + self.manager.check()

    def manager_ids(self) -> set[str]:
        """Whose tables the manager showed after the last call."""
        return {row.request.request_id for row in self.manager.requests.values()}

    def sync(self) -> None:
        """The running requests as the manager's rows, and the contents that their hashes stand for."""
        self.manager.requests = {
            self.rows[request.request_id]: Row(
                request, self.namespaces[request.request_id], request.num_in_flight_tokens
            )
            for request in self.core.running
        }
        for request in self.core.running:
            self.manager.learn(request, self.namespaces[request.request_id])

    def _apply(self, out: Any) -> dict[str, int]:
        """Take the differences over, as `GPUModelRunner._update_states` does. Returns where each row begins."""
        computed = {}
        for new in out.scheduled_new_reqs:
            self.rows[new.req_id] = self._free_row()
            self.runners[new.req_id] = Runner(list(new.prompt_token_ids), list(new.block_ids[0]), self.rows[new.req_id])
            computed[new.req_id] = new.num_computed_tokens
        known = out.scheduled_cached_reqs
        for id, blocks, start in zip(known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True):
            runner = self.runners[id]
            if id in known.resumed_req_ids:
                self.rows[id] = self._free_row()
                runner.blocks = []
            # Told of a request that was not in the step before: what it sampled meanwhile may have been dropped.
            runner.tokens = list(known.all_token_ids.get(id, runner.tokens))
            runner.blocks += blocks[0] if blocks is not None else []
            computed[id] = start
        return computed

    def _batch(self, out: Any, computed: dict[str, int], changes: list[tuple[int, int, int]]) -> Any:
        ids, size = list(out.num_scheduled_tokens), self.world.block_size
        num_tokens = np.array([out.num_scheduled_tokens[id] for id in ids], np.int64)
        begins = np.array([computed[id] for id in ids], np.int64)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for id, start, count in zip(ids, begins.tolist(), num_tokens.tolist(), strict=True):
            runner, span = self.runners[id], range(start, start + count)
            tokens += [runner.tokens[p] for p in span]
            positions += span
            slots += [(runner.blocks[p // size] - 1) * size + p % size for p in span]
        tables = np.full((max(self.rows.values(), default=0) + 1, self.world.num_blocks), -1, np.int32)
        for row in self.manager.requests:
            table = self.manager.table(row)
            tables[row, : len(table)] = table
        rows, columns, blocks = np.array(changes, np.int64).reshape(-1, 3).T
        return SimpleNamespace(
            out=out,
            rows=np.array([self.rows[id] for id in ids], np.int64),
            num_tokens=num_tokens,
            query_start_loc=np.concatenate([[0], np.cumsum(num_tokens)]).astype(np.int64),
            token_ids=np.array(tokens, np.int32),
            positions=np.array(positions, np.int64),
            slot_mapping=np.array(slots, np.int64),
            seq_lens=begins + num_tokens,
            samples=np.array(
                [computed[id] + out.num_scheduled_tokens[id] == len(self.runners[id].tokens) for id in ids], bool
            ),
            ids=np.array(ids, object),
            sequences=np.zeros(len(ids), np.int64),
            block_tables=tables,
            table_rows=rows,
            table_columns=columns,
            table_blocks=(blocks - 1).astype(np.int32),
            moves=Moves(),
            loads=np.empty((0, 3), np.int32),
            is_empty=not ids,
            preempted=tuple((id, "recompute") for id in sorted(out.preempted_req_ids or ())),
            admitted=(
                *(new.req_id for new in out.scheduled_new_reqs),
                *sorted(out.scheduled_cached_reqs.resumed_req_ids),
            ),
        )

    def _free_row(self) -> int:
        return next(row for row in range(len(self.rows) + 1) if row not in self.rows.values())

    def _end(self, id: str, how: str) -> None:
        self.ended[id] = how
        self.tally[how] += 1
        self.rows.pop(id, None)
