"""The plug-in for asynchronous scheduling as the kit's `StepScheduler`, and a runner that keeps tokens as vLLM's V1 runner does then.

step 7: "a" samples, and has a place without a value | step 8: the last token of "a" comes from the device, where step 7 left it
"""

from typing import Any

from integrations.plugged import Plugged, Runner, Share, UnlikeDecided

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
        stays = (
            set(output.num_scheduled_tokens) - output.finished_req_ids - output.scheduled_cached_reqs.resumed_req_ids
        )
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
