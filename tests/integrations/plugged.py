"""Our plug-in as the kit's `StepScheduler`: vLLM's objects go in and come out, and a model runner of vLLM's kind stands behind it.

The runner keeps of each request its tokens and its block table, and takes the differences that a step tells it, as
vLLM's `GPUModelRunner._update_states` does; from what it keeps it works out tokens, positions and slots of the step.
They have to be those that our scheduler decided. The kit watches all the rest. For
asynchronous scheduling the runner keeps tokens as vLLM's V1 runner does then:

step 7: "a" samples, and has a place without a value | step 8: the last token of "a" comes from the device, where step 7 left it
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from integrations import vllm_things

from paged import Output
from paged.errors import DuplicateRequest, NeverFits
from paged.testing import Capabilities
from paged.testing.world import World

LACKS = (
    "fork", "host_tier", "host_content", "retention", "groups", "external_tokens", "cancel", "drafts", "reserve",
    "hints",
)  # fmt: skip
CAPABILITIES = Capabilities(**dict.fromkeys(LACKS, False))
Share = tuple[list[int], list[int], list[int]]
"""Tokens, positions and slots that a request computes in a step."""


@dataclass
class Known:
    """What the runner keeps of a request."""

    prompt: list[int]
    tables: tuple[list[int], ...]
    outputs: list[int | None] = field(default_factory=list)


class Runner:
    """vLLM's model runner without a model. `in_batch` are the requests of the step before."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.known: dict[str, Known] = {}
        self.in_batch: set[str] = set()

    def run(self, output: Any, batch: Any) -> dict[str, Share]:
        """Of each request of the step: its tokens, positions and slots. Of the batch only its number is looked at."""
        starts = self._told(output)
        return {id: self._step(id, starts[id], count, output) for id, count in output.num_scheduled_tokens.items()}

    def _told(self, output: Any) -> dict[str, int]:
        """Take in what a step tells; where each of its requests begins."""
        told = output.scheduled_cached_reqs
        for id in output.finished_req_ids:
            self.known.pop(id, None)
        self.in_batch &= set(output.num_scheduled_tokens) - output.finished_req_ids - told.resumed_req_ids
        starts = {}
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.known, f"{new.req_id} is told as new, and is known"
            self.known[new.req_id] = Known(list(new.prompt_token_ids), new.block_ids)
            starts[new.req_id] = new.num_computed_tokens
        for id, blocks, start, num_outputs in zip(
            told.req_ids, told.new_block_ids, told.num_computed_tokens, told.num_output_tokens, strict=True
        ):
            known = self.known[id]
            self._take_outputs(id, num_outputs, told)
            assert len(known.outputs) == num_outputs, f"{id} is told to have {num_outputs}, and has {known.outputs}"
            if id in told.resumed_req_ids:
                assert id not in self.in_batch, f"{id} is resumed, and is in the batch"
                known.tables = blocks
            elif blocks is not None:
                for table, more in zip(known.tables, blocks, strict=True):
                    table.extend(more)
            starts[id] = start
        self.in_batch |= set(output.num_scheduled_tokens)
        return starts

    def _take_outputs(self, id: str, num_outputs: int, told: Any) -> None:
        """Come to so many outputs: here, drop what is beyond them."""
        del self.known[id].outputs[num_outputs:]

    def sampled(self, batch: Any, sampled: dict[str, list[int]]) -> None:
        """What it sampled in a step, the oldest of which that has not been told."""
        for id, tokens in sampled.items():
            if id in self.known:
                self.known[id].outputs += tokens

    def _step(self, id: str, start: int, count: int, output: Any) -> Share:
        known, size = self.known[id], self.block_size
        tokens = known.prompt + known.outputs + output.scheduled_spec_decode_tokens.get(id, [])
        span = range(start, start + count)
        table = known.tables[0]
        # A state has one column.
        slots = [(table[p // size] - 1) * size + p % size if p // size < len(table) else -1 for p in span]
        return [tokens[p] for p in span], list(span), slots


_SPECS = {
    "full": ("FullAttentionSpec", ""),
    "window": ("SlidingWindowSpec", "sliding_window"),
    "chunk": ("ChunkedLocalAttentionSpec", "attention_chunk_size"),
    "state": ("MambaSpec", ""),
}


class Part(NamedTuple):
    """A group of vLLM's: what its layers keep, and which pages it is of a block of which of ours."""

    spec: Any
    group: int
    pages: slice
    is_state: bool


def parts_in(world: World) -> list[Part]:
    """The groups of vLLM's for a model of several kinds of layers: one a page of a block, or one of blocks of half the size for two; a
    state's block is said to hold any number of tokens."""
    parts, is_whole = list[Part](), False
    for number, group in enumerate(world.groups):
        kind, reach = _SPECS[group.kind]
        given, first = {reach: group.reach} if reach else {}, 0
        while first < group.pages:
            halves = group.kind != "state" and is_whole and world.block_size % 2 == 0 and first + 2 <= group.pages
            size = 99 if group.kind == "state" else world.block_size // (1 + halves)
            pages, is_whole = slice(first, first + 1 + halves), is_whole or group.kind != "state"
            parts.append(Part(vllm_things.spec(kind, size, **given), number, pages, group.kind == "state"))
            first = pages.stop
    return parts


class Plugged:
    """The plug-in, asked as a `StepScheduler`. One batch out at a time, as vLLM's `EngineCore.step` asks it."""

    capabilities = CAPABILITIES
    is_ahead = False
    runner_class = Runner

    def __init__(self, world: World, *, scheduling_policy: str = "fcfs", **given: Any) -> None:
        self.parts, self._most_tokens = parts_in(world), world.max_model_len or 1 << 30
        limits = {"max_num_seqs": world.max_sequences, "max_num_batched_tokens": world.max_tokens_per_step}
        options = {"paged": {"policy": world.policy, "prefix_caching": world.prefix_caching}}
        given |= limits | {
            "max_model_len": self._most_tokens,
            "policy": scheduling_policy,
            "additional_config": options,
        }
        specs = [part.spec for part in self.parts]
        self.core = vllm_things.plug_in(
            world.num_blocks, world.block_size, specs=specs, is_ahead=self.is_ahead, **given
        )
        self.manager = self.core.manager
        self.runner = self.runner_class(world.block_size)
        self.now = 0.0
        self.core.clock = lambda: self.now
        # Steps that have not ended, as the runner and as our scheduler know them.
        self.out: list[tuple[Any, Any]] = []
        self.late: list[Output] = []

    @property
    def policy(self) -> Any:
        return self.core.decisions.policy

    @property
    def has_unfinished(self) -> bool:
        return bool(self.core.get_num_unfinished_requests() or self.late)

    def add(self, request: Any, now: float = 0.0) -> None:
        """A vLLM request. What the front end refuses of ids is refused here; what never fits the plug-in ends with "error"."""
        if request.id in self.core._live or any(request.id in output.num_scheduled_tokens for output, _ in self.out):
            raise DuplicateRequest(request.id)
        sampling = {"max_tokens": request.max_tokens, "stop_token_ids": list(request.stop_token_ids)}
        made = vllm_things.request(
            request.id,
            [int(token) for token in request.prompt],
            sampling=sampling | {"eos_token_id": request.eos_token_id},
            arrival_time=now,
            priority=request.priority,
            cache_salt=request.salt,
            lora_request=None if request.adapter is None else SimpleNamespace(lora_name=request.adapter),
            skip_reading_prefix_cache=not request.reads_cache,
        )
        self.core.add_request(made)
        problem = self.core._live[request.id].problem
        if problem is not None:
            self.core.finish_requests(request.id, made.status.__class__.FINISHED_ERROR)
            raise NeverFits(problem, needed=0, limit=0, unit="blocks")

    def schedule(self, now: float = 0.0) -> Any:
        """One step, held against what the runner makes of it."""
        self.now = now
        output = self.core.schedule()
        batch = self.core._out[-1][1]
        self.compare(batch, self.runner.run(output, batch))
        copies = [(copy.src_block_id - 1, copy.dst_block_id - 1) for copy in output.kv_cache_block_copies or ()]
        assert copies == _copies_in(batch)
        self.out.append((output, batch))
        self.late += self._end_empty_ones()
        return batch

    def update(self, batch: Any, token_ids: Any, counts: Any = None, now: float = 0.0) -> list[Output]:
        """The step ran: sampled tokens, one of each row that samples unless `counts` say otherwise."""
        self.now = now
        late, self.late = self.late, []
        if batch.is_empty:
            return late
        each = batch.samples.astype(np.int64) if counts is None else np.asarray(counts)
        stops, tokens = each.cumsum().tolist(), np.asarray(token_ids).tolist()
        sampled = {
            id: tokens[stop - count : stop]
            for id, stop, count in zip(batch.ids.tolist(), stops, each.tolist(), strict=True)
        }
        self.runner.sampled(batch, sampled)
        return late + self._ended(sampled) + self._end_empty_ones()

    def abort(self, id: str, /) -> Output | None:
        self.core.decisions.status(id)
        if id not in self.core._live:
            return None
        self.core.finish_requests(id, self.core._live[id].request.status.__class__.FINISHED_ABORTED)
        return Output(id, 0, [], "abort")

    def __getattr__(self, name: str) -> Any:
        # What the kit only reads: status, id_of, rows_of, counts, explain, check and the like.
        return getattr(self.core.decisions, name)

    def _end_empty_ones(self) -> list[Output]:
        """Steps without requests, which end as soon as no older one is out."""
        ended: list[Output] = []
        while self.out and self.out[0][1].is_empty:
            ended += self._ended({})
        return ended

    def _ended(self, sampled: dict[str, list[int]]) -> list[Output]:
        output, _ = self.out.pop(0)
        made = self.core.update_from_output(output, vllm_things.answer(output, sampled))
        ended = [each for outputs in made.values() for each in outputs.outputs]
        reasons = [None if each.finish_reason is None else each.finish_reason.name.lower() for each in ended]
        return [Output(each.request_id, 0, [*each.new_token_ids], why) for each, why in zip(ended, reasons)]

    def compare(self, batch: Any, computed: dict[str, Share]) -> None:
        bounds = batch.query_start_loc.tolist()
        for place, id in enumerate(batch.ids.tolist()):
            span = slice(bounds[place], bounds[place + 1])
            decided = tuple(column[span].tolist() for column in (batch.token_ids, batch.positions, batch.slot_mapping))
            if batch.groups is not None:
                self._compare_tables(batch, place, self.runner.known[id].tables)
                # Slots are those of blocks that are one page each.
                decided = (*decided[:2], computed[id][2])
            assert computed.get(id) == decided, id
        assert sorted(computed) == sorted(batch.ids.tolist())

    def _compare_tables(self, batch: Any, place: int, told: tuple[list[int], ...]) -> None:
        """The runner has every block that the row has in each group. What a window has passed is the null block, or what it was."""
        num_blocks = self.manager.rows.num_blocks[batch.rows[place]]
        for table, (_, group, pages, is_state) in zip(told, self.parts, strict=True):
            decided = batch.groups[group].tables[place, : 1 if is_state else num_blocks, pages].ravel() + 1
            # The runner's tables end with the longest sequence.
            decided = decided[: -(-self._most_tokens * (pages.stop - pages.start) // self.manager.block_size)]
            has = np.array(table[: len(decided)])
            assert len(has) == len(decided), (batch.ids[place], group)
            assert not ((has != decided) & (decided > 0)).any(), (batch.ids[place], group, table, decided)


def _copies_in(batch: Any) -> list[tuple[int, int]]:
    """The copies that were decided, and those of states that are not written where they are read, by page."""
    copies = [tuple(pair) for pair in batch.moves.device_to_device.tolist()]
    for group in batch.groups or ():
        if group._layout.groups[group._number].kind == "state":
            pairs = zip(group.read.ravel().tolist(), group.write.ravel().tolist(), strict=True)
            copies += [(read, write) for read, write in pairs if read not in (-1, write)]
    return copies


Source = tuple[int, int]
"""A batch, and the place among its rows that samples."""


class RunnerAhead(Runner):
    """On its device it has what the step before sampled, of requests that are in this one, too, and are not resumed. Whoever is told anew gets
    its tokens from `all_token_ids`; values of others that it sampled it never learns."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        # Who sampled in the step before, and is still in the batch; and whose value comes from there in this one.
        self.on_device: dict[str, Source] = {}
        self.taken: dict[str, Source] = {}
        # What was sampled, as far as updates have told.
        self.values: dict[Source, int] = {}

    def run(self, output: Any, batch: Any) -> dict[str, Share]:
        """Of each request of the step: its tokens, -1 where only the device has the value, positions and slots."""
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        stays = set(output.num_scheduled_tokens) - output.finished_req_ids - resumed
        before = {id: source for id, source in self.on_device.items() if id in stays}
        starts = self._told(output)
        self.on_device, self.taken = {}, {}
        shares = {}
        for place, (id, count) in enumerate(output.num_scheduled_tokens.items()):
            known, stop = self.known[id], starts[id] + count
            if id in before:
                self.taken[id] = before[id]
            shares[id] = self._step(id, starts[id], count, output)
            if stop == len(known.prompt) + len(known.outputs):
                known.outputs.append(None)
                self.on_device[id] = (batch.number, place)
        return shares

    def _take_outputs(self, id: str, num_outputs: int, told: Any) -> None:
        """Of one that was not in the step before, what the step tells."""
        super()._take_outputs(id, num_outputs, told)
        if id not in self.in_batch and num_outputs:
            self.known[id].outputs = list(told.all_token_ids[id][-num_outputs:])

    def sampled(self, batch: Any, sampled: dict[str, list[int]]) -> None:
        for place, id in enumerate(batch.ids.tolist()):
            for token in sampled[id]:
                self.values[batch.number, place] = token

    def _step(self, id: str, start: int, count: int, output: Any) -> Share:
        tokens, positions, slots = super()._step(id, start, count, output)
        if id in self.taken:
            # Whatever the last token is.
            tokens[-1] = self.values.get(self.taken[id], -1)
        assert None not in tokens, f"{id} computes {tokens} from {start} on: of one it has no value"
        return tokens, positions, slots


class PluggedAhead(Plugged):
    """The plug-in that schedules a step while the one before it is out, as vLLM's `EngineCore.step_with_batch_queue` asks it."""

    is_ahead = True
    runner_class = RunnerAhead

    def compare(self, batch: Any, computed: dict[str, Share]) -> None:
        super().compare(batch, computed)
        assert self.runner.on_device.keys() == set(batch.ids[batch.samples].tolist())
        last = batch.query_start_loc[1:] - 1
        sources = zip(batch.ids.tolist(), batch.source_batches[last].tolist(), batch.source_places[last].tolist())
        for id, *source in sources:
            assert source[0] < 0 or tuple(source) == self.runner.taken.get(id), id
