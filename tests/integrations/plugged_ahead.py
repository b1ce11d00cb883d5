"""The plug-in for asynchronous scheduling as the kit's `StepScheduler`, and a runner that keeps tokens as vLLM's V1 runner does then.

    step 7: "a" samples, and has a place without a value | step 8: the last token of "a" comes from the device, where step 7 left it

Knows vLLM's objects by their fields.
"""

from __future__ import annotations

from typing import Any

from integrations.plugged import Known, Plugged, Runner, Share, UnlikeDecided

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
        told = output.scheduled_cached_reqs
        for id in output.finished_req_ids:
            self.known.pop(id, None)
        stays = set(output.num_scheduled_tokens) - output.finished_req_ids - told.resumed_req_ids
        self.in_batch &= stays
        self.on_device = {id: source for id, source in self.on_device.items() if id in stays}
        starts = {}
        for new in output.scheduled_new_reqs:
            if new.req_id in self.known:
                raise UnlikeDecided(f"{new.req_id} is told as new, and is known")
            self.known[new.req_id] = Known(list(new.prompt_token_ids), new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
        for id, blocks, start, num_outputs in zip(
            told.req_ids, told.new_block_ids, told.num_computed_tokens, told.num_output_tokens, strict=True
        ):
            known = self.known[id]
            del known.outputs[num_outputs:]
            if id not in self.in_batch and num_outputs:
                known.outputs = list(told.all_token_ids[id][-num_outputs:])
            if len(known.outputs) != num_outputs:
                raise UnlikeDecided(f"{id} is told to have {num_outputs} outputs, and has {known.outputs}")
            if id in told.resumed_req_ids:
                known.blocks = blocks[0]
            elif blocks is not None:
                known.blocks.extend(blocks[0])
            starts[id] = start
        self.in_batch |= set(output.num_scheduled_tokens)
        before, self.on_device, self.taken = self.on_device, {}, {}
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

    def sampled(self, batch: Any, sampled: dict[str, list[int]]) -> None:
        for place, id in enumerate(batch.ids.tolist()):
            for token in sampled[id]:
                self.values[batch.number, place] = token

    def _step(self, id: str, start: int, count: int, output: Any) -> Share:
        tokens, positions, slots = super()._step(id, start, count, output)
        if id in self.taken:
            # Whatever the last token is.
            tokens[-1] = self.values.get(self.taken[id], -1)
        if None in tokens:
            raise UnlikeDecided(f"{id} computes {tokens} from {start} on: of one it has no value")
        return tokens, positions, slots


class PluggedAhead(Plugged):
    """The plug-in that schedules a step while the one before it is out, as vLLM's `EngineCore.step_with_batch_queue` asks it."""

    is_ahead = True
    runner_class = RunnerAhead

    def compare(self, batch: Any, computed: dict[str, Share]) -> None:
        super().compare(batch, computed)
        samples = {id for id, yes in zip(batch.ids.tolist(), batch.samples.tolist()) if yes}
        if samples != self.runner.on_device.keys():
            raise UnlikeDecided(
                f"the runner samples for {sorted(self.runner.on_device)}; decided was {sorted(samples)}"
            )
        last = batch.query_start_loc[1:] - 1
        sources = zip(batch.ids.tolist(), batch.source_batches[last].tolist(), batch.source_places[last].tolist())
        for id, *source in sources:
            taken = self.runner.taken.get(id)
            if source[0] >= 0 and tuple(source) != taken:
                raise UnlikeDecided(f"{id}: the runner takes what {taken} sampled; decided was {source}")
