"""What becomes of sequences that belong to one request: each end is told once, and they are preempted together."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paged import LLM, BeamSearchParams, ContrastiveSearchParams, Engine, SamplingParams  # noqa: E402
from paged.testing.tiny_model import tiny_model  # noqa: E402

TINY = tiny_model()


def kind_of(params):
    return type(params).__name__


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=3, n=2, temperature=1.0),
        BeamSearchParams(beam_width=3, n=3, max_tokens=3),
        ContrastiveSearchParams(max_tokens=3),
    ],
    ids=kind_of,
)
def test_an_end_is_told_exactly_once(params):
    told = []
    LLM(TINY, block_size=4).generate([[1, 2, 3]] * 3, params, on_output=told.append, use_tqdm=False)
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
    ids=kind_of,
)
@pytest.mark.parametrize("host_blocks", [0, 60])
def test_a_group_is_preempted_together_and_says_the_same(params, host_blocks):
    prompt = [1, 2, 3, 4, 5, 6]
    (alone,) = LLM(TINY, num_blocks=400, block_size=4).generate([prompt], params)
    # Its five rows at their longest fill the pool, and others came before it.
    engine = Engine(TINY, num_blocks=42, block_size=4, host_blocks=host_blocks, policy="vllm", max_sequences=16)
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
    assert engine.manager.device.num_used == 0 and np.all(engine.manager.device.states != 2)
