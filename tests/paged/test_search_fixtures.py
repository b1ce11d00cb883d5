"""Searches that transformers' core has dropped, against answers of the last version that had them (tools/search_fixtures.py made them)."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from paged import (  # noqa: E402
    LLM,
    BeamSearchParams,
    ContrastiveSearchParams,
    Engine,
    SamplingParams,
    load_model,
)
from paged.decoding.beam_groups import BeamGroups  # noqa: E402
from paged.errors import InvalidSampling, NeverFits  # noqa: E402
from paged.model.checkpoint import checkpoint_path  # noqa: E402

from .searching import STOP, VOCABULARY, hypotheses_of, most_used, table  # noqa: E402, TID252

FIXTURES = json.loads((Path(__file__).parent / "fixtures" / "searches.json").read_text(encoding="utf-8"))
TOKENS = FIXTURES["max_tokens"]
WORLDS = [
    {},
    {"num_blocks": 80, "block_size": 1},
    {"num_blocks": 30, "block_size": 4},
    {"num_blocks": 13, "block_size": 4},
    {"num_blocks": 13, "block_size": 4, "host_blocks": 10},
    {"num_blocks": 40, "block_size": 4, "max_tokens_per_step": 7},
    {"num_blocks": 60, "block_size": 2, "max_sequences": 5},
    {"num_blocks": 40, "block_size": 4, "speculate": "lookup"},
    {"num_blocks": 40, "block_size": 4, "policy": "orca-max"},
    {"num_blocks": 40, "block_size": 4, "prefix_caching": False},
]


def name_of(options):
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "ample"


@pytest.fixture(scope="module")
def model():
    return load_model(checkpoint_path())


@pytest.mark.parametrize("early", [False, True, "never"])
def test_groups_on_made_up_models(early):
    cases = [case for case in FIXTURES["tables"] if case["early_stopping"] == early]
    assert len(cases) == 96
    for case in cases:
        seed = case["seed"]
        chances, prompt = table(seed, 1.0 + seed % 3), [seed % VOCABULARY, (5 * seed + 1) % VOCABULARY]
        search = BeamGroups(
            case["width"],
            case["num_groups"],
            case["diversity_penalty"],
            stops=[STOP],
            max_tokens=FIXTURES["max_tokens_of_tables"],
            length_penalty=case["length_penalty"],
            early_stopping=early,
        )
        found = hypotheses_of(search, chances, prompt)
        assert [list(each.tokens) for each in found] == case["answers"]
        assert [each.score for each in found] == pytest.approx(case["scores"], rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("options", WORLDS, ids=name_of)
def test_groups_and_contrastive_search_on_the_model_that_ships(model, options):
    asked, expected = [], []
    for case in FIXTURES["groups"]:
        names = ("beam_width", "num_groups", "diversity_penalty")
        width, groups, diversity = (case[name] for name in names)
        params = BeamSearchParams(
            beam_width=width, n=width, num_beam_groups=groups, diversity_penalty=diversity, max_tokens=TOKENS
        )
        if width > options.get("max_sequences", width):
            continue
        asked.append((case["prompt"], params))
        expected.append((case["answers"], case["scores"]))
    for case in FIXTURES["contrastive"]:
        params = ContrastiveSearchParams(penalty_alpha=case["penalty_alpha"], top_k=case["top_k"], max_tokens=TOKENS)
        asked.append((case["prompt"], params))
        expected.append(([case["tokens"]], None))
    # Others come and go beside them, with the same prompts.
    asked += [(prompt, SamplingParams(max_tokens=20)) for prompt, _ in asked]
    llm = LLM(model, **options)
    llm.engine.on_batch = lambda batch: check(llm.engine)
    found = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    for answer, (tokens, scores) in zip(found, expected, strict=False):
        assert [each.token_ids for each in answer.outputs] == tokens
        if scores is not None:
            assert [each.score for each in answer.outputs] == pytest.approx(scores, rel=1e-4)
        assert answer.finish_reason == ("stop" if tokens[0][-1] == 0 else "length")
    assert (llm.engine.manager.device.num_used, llm.engine.has_unfinished, bool(llm.engine._searches)) == (
        0,
        False,
        False,
    )


def check(engine):
    assert engine.check() == []


def test_candidates_are_forks_of_one_answer(model):
    engine = Engine(model, block_size=4, num_blocks=400)
    prompt = list(range(1, 81))
    engine.add_request(prompt, ContrastiveSearchParams(top_k=5, max_tokens=12, ignore_eos=True))
    # Five copies would hold more than a hundred blocks.
    assert most_used(engine) <= 20 + 5 * 4


def test_content_without_hidden_states_is_not_taken(model):
    llm = LLM(model, block_size=4)
    prompt = list(range(1, 42))
    llm.generate([prompt], SamplingParams(max_tokens=2))
    params = ContrastiveSearchParams(max_tokens=3, ignore_eos=True)
    first = llm.contrastive_search([prompt], params)[0]
    assert first.usage.hit_tokens == 0
    again = llm.contrastive_search([prompt], params)[0]
    assert (again.token_ids, again.usage.hit_tokens) == (first.token_ids, 0)


def test_a_stop_id_ends_a_contrastive_search(model):
    case = FIXTURES["contrastive"][0]
    stop = case["tokens"][5]
    params = ContrastiveSearchParams(penalty_alpha=0.6, top_k=4, max_tokens=TOKENS, stop_token_ids=(stop,))
    answer = LLM(model).contrastive_search(case["prompt"], params)[0]
    assert answer.token_ids == case["tokens"][: case["tokens"].index(stop) + 1]
    assert (answer.finish_reason, answer.outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"penalty_alpha": 0.0}, "penalty_alpha has to be a number above 0 and at most 1; got 0.0"),
        ({"penalty_alpha": float("nan")}, "penalty_alpha has to be a number above 0 and at most 1; got nan"),
        ({"top_k": 1}, "top_k has to be an integer from 2 to"),
        ({"max_tokens": 0}, "max_tokens has to be an integer of at least 1; got 0"),
        ({"ignore_eos": "no"}, "ignore_eos has to be True or False; got 'no'"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(InvalidSampling, match=message):
        ContrastiveSearchParams(**fields)


def test_more_candidates_than_tokens_are_refused_before_the_request_is_queued(model):
    engine = Engine(model)
    with pytest.raises(InvalidSampling, match="top_k has to be an integer from 2 to 1,024; got 2000"):
        engine.add_request("def", ContrastiveSearchParams(top_k=2000))
    assert not engine.has_unfinished


def test_a_prompt_that_leaves_no_room_for_candidates_is_refused_and_one_token_less_is_answered(model):
    engine = Engine(model, num_blocks=5, block_size=4)
    with pytest.raises(
        NeverFits, match="needs 21 tokens for its prompt, candidates for a first output and what may follow; 20 fit"
    ):
        engine.add_request(list(range(1, 20)), ContrastiveSearchParams(ignore_eos=True))
    live = engine.live_request(engine.add_request(list(range(1, 19)), ContrastiveSearchParams(ignore_eos=True)))
    while engine.has_unfinished:
        engine.step()
        assert engine.check() == []
    assert len(live.completion().token_ids) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beam_groups": 3}, r"num_beam_groups has to be an integer that divides beam_width \(4\); got 3"),
        ({"num_beam_groups": 2}, "groups above 1 and a penalty above 0 go together"),
        ({"diversity_penalty": 0.5}, "groups above 1 and a penalty above 0 go together"),
        ({"num_beam_groups": 2, "diversity_penalty": -1}, "diversity_penalty has to be a finite number of at least 0"),
    ],
)
def test_groups_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(InvalidSampling, match=message):
        BeamSearchParams(beam_width=4, **fields)
