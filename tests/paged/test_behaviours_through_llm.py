"""What the field's tests say of forks, of ends and of groups that are preempted (BEHAVIOURS C, L, J10), asked of an LLM that runs a model."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paged import LLM, BeamSearchParams, ContrastiveSearchParams, SamplingParams  # noqa: E402
from paged.testing.tiny_model import tiny_model  # noqa: E402

TINY = tiny_model()


class Seen:
    """An LLM whose invariants are checked after each batch, and what its batches were."""

    def __init__(self, model, **options):
        self.llm = LLM(model, **options)
        self.engine, self.batches = self.llm.engine, []
        self.engine.on_batch = self._note
        self.free = self.manager.device.num_free

    @property
    def manager(self):
        return self.engine.manager

    def _note(self, batch):
        assert self.engine.check() == []
        self.batches.append(batch)

    def generate(self, prompts, params):
        found = self.llm.generate(prompts, params, use_tqdm=False)
        assert (self.manager.device.num_used, self.engine.check()) == (0, [])
        assert self.manager.device.num_free + self.manager.device.num_cached == self.free
        return found


def test_C5_a_prompt_of_full_blocks_is_held_once_by_all():
    seen = Seen(TINY, num_blocks=24, block_size=4)
    used = []
    seen.engine.on_batch = lambda batch: used.append((len(batch.rows), seen.manager.device.num_used))
    seen.generate([[1, 2, 3, 4, 5, 6, 7, 0]], BeamSearchParams(beam_width=4, max_tokens=3, ignore_eos=True))
    # Two blocks of the prompt, and one of each beam that goes on.
    assert max(blocks for _, blocks in used) == 2 + 4


@pytest.mark.parametrize("kind", [None, "lookup", "lookahead", "draft"])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_L3_tokens_beyond_the_limit_are_dropped(model, kind, most):
    prompt = "a, b, c, a, b, c, a, b"
    (whole,) = Seen(model).generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
    seen = Seen(model, speculate=kind)
    # Drafts are begun with few: the second time it knows the text.
    (answer,) = seen.generate([prompt], SamplingParams(max_tokens=most, ignore_eos=True))
    assert (answer.token_ids, answer.finish_reason) == (whole.token_ids[:most], "length")
    assert answer.usage.output_tokens == most


@pytest.mark.parametrize("kind", [None, "lookup", "draft"])
def test_L3_tokens_behind_a_stop_are_dropped(model, kind):
    prompt = "a, b, c, a, b, c, a, b"
    (whole,) = Seen(model).generate([prompt], SamplingParams(max_tokens=16, ignore_eos=True))
    for place, stop in enumerate(whole.token_ids):
        params = SamplingParams(max_tokens=16, ignore_eos=True, stop_token_ids=(stop,))
        (answer,) = Seen(model, speculate=kind).generate([prompt], params)
        assert answer.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1], place
        assert (answer.finish_reason, answer.outputs[0].stop_reason) == ("stop", stop)


def test_L5_before_min_tokens_nothing_ends_it(model):
    (plain,) = Seen(model).generate(["def"], SamplingParams(max_tokens=12, ignore_eos=True))
    stop = plain.token_ids[2]
    (answer,) = Seen(model).generate(
        ["def"], SamplingParams(max_tokens=12, min_tokens=5, stop_token_ids=(stop,), ignore_eos=True)
    )
    # It is not drawn before, as in transformers, so that what comes is another text.
    assert stop not in answer.token_ids[:5] and len(answer.token_ids) >= 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=3, n=2, temperature=1.0),
        BeamSearchParams(beam_width=3, n=3, max_tokens=3),
        ContrastiveSearchParams(max_tokens=3),
    ],
    ids=lambda params: type(params).__name__,
)
def test_L8_an_end_is_told_exactly_once(params):
    seen = Seen(TINY, block_size=4)
    told = []
    seen.llm.generate([[1, 2, 3]] * 3, params, on_output=lambda output: told.append(output), use_tqdm=False)
    ends = [(output.id, output.sequence) for output in told if output.finish_reason is not None]
    assert len(ends) == len(set(ends)) == 3 * params.n
    assert sum(output.finished for output in told) == 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, n=5, temperature=1.0, seed=1, ignore_eos=True),
        BeamSearchParams(beam_width=5, n=5, max_tokens=20, ignore_eos=True),
        ContrastiveSearchParams(top_k=5, max_tokens=20, ignore_eos=True),
    ],
    ids=lambda params: type(params).__name__,
)
@pytest.mark.parametrize("host_blocks", [0, 60])
def test_J10_a_group_is_preempted_together_and_says_the_same(params, host_blocks):
    prompt = [1, 2, 3, 4, 5, 6]
    (alone,) = Seen(TINY, num_blocks=400, block_size=4).generate([prompt], params)
    # Its five rows at their longest fill the pool, and others came before it.
    seen = Seen(TINY, num_blocks=42, block_size=4, host_blocks=host_blocks, policy="vllm", max_sequences=16)
    engine = seen.engine
    for number in range(6):
        engine.add_request([number, 7, 7], SamplingParams(max_tokens=30, ignore_eos=True))
    group = engine.live_request(engine.add_request(prompt, params, id="group"))
    runs_partly, preempted = [], set()

    def note(batch):
        assert engine.check() == []
        preempted.update(id for id, _ in batch.preempted)
        state = engine.scheduler._state.requests.get("group")
        if state is not None:
            rows = {row for row in state.rows if row >= 0}
            running = rows & set(engine.scheduler.running_rows().tolist())
            runs_partly.append(0 < len(running) < len(rows))

    engine.on_batch = note
    while engine.has_unfinished:
        engine.step()
    assert not any(runs_partly)
    found = group.completion()
    assert [(each.token_ids, each.score) for each in found.outputs] == [
        (each.token_ids, each.score) for each in alone.outputs
    ]
    assert preempted & {"group"} or any(id.startswith("group/") for id in preempted)
    assert seen.manager.device.num_used == 0 and np.all(seen.manager.device.states != 2)
