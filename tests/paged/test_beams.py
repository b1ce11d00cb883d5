"""Beam search through LLM, on the model that ships: transformers' answers, whatever memory there is."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paged import LLM, BeamSearchParams, Engine, SamplingParams, load_model  # noqa: E402
from paged.errors import InvalidRequest, InvalidSampling  # noqa: E402
from paged.model.checkpoint import checkpoint_path  # noqa: E402

from .searching import most_used  # noqa: E402, TID252

PROMPTS = ["The with statement", "Return a new list", "def", "Changed in version 3.", "A generator is"]
WISHES = [
    {"beam_width": 2},
    {"beam_width": 3, "length_penalty": 0.0, "early_stopping": True},
    {"beam_width": 4, "length_penalty": 2.0, "n": 3},
    {"beam_width": 5, "length_penalty": -0.5, "early_stopping": "never", "n": 2},
    {"beam_width": 2, "early_stopping": True, "n": 2},
]
TOKENS = 14


@pytest.fixture(scope="module")
def model():
    return load_model(checkpoint_path())


@pytest.fixture(scope="module")
def expected(model):
    """Of each prompt and wish, transformers' answers and their scores."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    found = []
    for prompt, wish in zip(PROMPTS, WISHES, strict=True):
        ids = model.tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=wish["beam_width"],
            num_return_sequences=wish.get("n", 1),
            length_penalty=wish.get("length_penalty", 1.0),
            early_stopping=wish.get("early_stopping", False),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=list(model.eos_token_ids),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        answers = []
        for tokens in out.sequences[:, ids.shape[1] :].tolist():
            ends = [place for place, token in enumerate(tokens) if token in model.eos_token_ids]
            answers.append(tokens[: ends[0] + 1] if ends else tokens)
        found.append((answers, out.sequences_scores.tolist()))
    return found


def params(wish):
    return BeamSearchParams(max_tokens=TOKENS, **wish)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 60, "block_size": 1},
        {"num_blocks": 24, "block_size": 4},
        {"num_blocks": 14, "block_size": 4},
        {"num_blocks": 14, "block_size": 4, "host_blocks": 10},
        {"num_blocks": 30, "block_size": 4, "max_tokens_per_step": 6},
        {"num_blocks": 60, "block_size": 2, "max_sequences": 5},
        {"num_blocks": 40, "block_size": 4, "speculate": "lookup"},
        {"num_blocks": 40, "block_size": 4, "policy": "orca-max"},
        {"num_blocks": 40, "block_size": 4, "prefix_caching": False},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items()) or "ample",
)
def test_the_answers_are_those_of_transformers(model, expected, options):
    llm = LLM(model, **options)
    plain = SamplingParams(max_tokens=20)
    # Others come and go beside them.
    found = llm.generate([*PROMPTS, *PROMPTS], [*map(params, WISHES), *[plain] * len(PROMPTS)])
    for answer, (tokens, scores), wish in zip(found, expected, WISHES, strict=False):
        assert [each.token_ids for each in answer.outputs] == tokens
        assert [each.score for each in answer.outputs] == pytest.approx(scores, rel=1e-4)
        assert len(answer.outputs) == wish.get("n", 1)
        assert answer.text == answer.outputs[0].text != ""
    assert llm.engine.check() == []
    assert (llm.engine.manager.device.num_used, llm.engine.has_unfinished, bool(llm.engine._searches)) == (
        0,
        False,
        False,
    )
    assert not llm.engine.scheduler.has_unfinished


def test_beams_hold_what_they_share_once(model):
    engine = Engine(model, block_size=4, num_blocks=400)
    prompt = list(range(1, 81))
    engine.add_request(prompt, BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True))
    # Four copies would hold a hundred blocks.
    assert most_used(engine) <= 20 + 4 * 5


@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_a_search_may_be_aborted_at_any_time(model, after):
    engine = Engine(model, block_size=4, num_blocks=40)
    engine.add_request(PROMPTS[0], params(WISHES[2]), id="a")
    engine.add_request(PROMPTS[1], params(WISHES[1]), id="b")
    for _ in range(after):
        engine.step()
    ended = engine.abort("a")
    assert (ended.id, ended.finish_reason, ended.finished, ended.token_ids) == ("a", "abort", True, [])
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [output.id for output in outputs] == ["b"] and outputs[0].finish_reason in ("stop", "length")
    assert engine.check() == [] and engine.manager.device.num_used == 0


@pytest.mark.parametrize("after", [0, 4])
def test_a_search_is_finished_for_a_known_reason_alone(model, after):
    engine = Engine(model, block_size=4, num_blocks=40)
    engine.add_request(PROMPTS[0], params(WISHES[2]), id="a")
    for _ in range(after):
        engine.step()
    before = engine.manager.device.num_used
    with pytest.raises(InvalidRequest, match='reason has to be "stop" or "length"; got \'soon\''):
        engine.finish("a", "soon")
    assert engine.has_unfinished and engine.manager.device.num_used == before
    ended = engine.finish("a", "length")
    assert (ended.finish_reason, ended.finished) == ("length", True)
    assert (engine.has_unfinished, engine.manager.device.num_used, engine.check()) == (False, 0, [])


def test_a_step_that_fails_is_taken_back_and_the_search_goes_on(model, expected):
    llm = LLM(model, block_size=4, num_blocks=40)
    runner, count = llm.engine.runner, 0
    real = runner.logits

    def now_and_then(batch):
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise MemoryError("too little")
        return real(batch)

    runner.logits = now_and_then
    try:
        found = llm.generate(PROMPTS, list(map(params, WISHES)))
    finally:
        del runner.logits
    assert [[each.token_ids for each in answer.outputs] for answer in found] == [tokens for tokens, _ in expected]
    assert llm.engine.stats().failed_steps > 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 1}, "beam_width has to be an integer of at least 2; got 1"),
        ({"beam_width": 3, "n": 4}, r"n has to be an integer from 1 to beam_width \(3\); got 4"),
        ({"beam_width": 3, "max_tokens": 0}, "max_tokens has to be an integer of at least 1; got 0"),
        (
            {"beam_width": 3, "length_penalty": float("inf")},
            "length_penalty has to be a number from -10 to 10; got inf",
        ),
        ({"beam_width": 3, "length_penalty": 1000.0}, "length_penalty has to be a number from -10 to 10; got 1000.0"),
        ({"beam_width": 3, "early_stopping": "soon"}, "early_stopping has to be True, False or \"never\"; got 'soon'"),
        ({"beam_width": 3, "stop_token_ids": 3}, "stop_token_ids has to be a tuple of token ids; got 3"),
        ({"beam_width": 3, "stop_token_ids": (-1,)}, "stop_token_ids have to be token ids from 0 to"),
        ({"beam_width": 3, "ignore_eos": 0}, "ignore_eos has to be True or False; got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(InvalidSampling, match=message):
        BeamSearchParams(**fields)


def test_beams_do_not_go_with_steps_ahead(model):
    with pytest.raises(InvalidSampling, match="does not go with steps_ahead"):
        LLM(model, steps_ahead=1).beam_search(PROMPTS[0], BeamSearchParams(beam_width=2))
