"""Beam, group and contrastive search, on made-up models and on the one that ships: transformers' answers.

Groups and contrastive search have left transformers' core: their answers are those of the last version that had them
(tools/search_fixtures.py made them).
"""

import json
from itertools import count
from pathlib import Path

import pytest
import torch
import transformers

from paged import LLM, BeamSearchParams, ContrastiveSearchParams, Engine, SamplingParams
from paged.decoding.beams import BeamGroups, BeamSearch
from paged.decoding.search import Ahead
from paged.errors import NeverFits
from paged.model.checkpoint import checkpoint_path

from ..driving import around, driven  # noqa: TID252

FIXTURES = json.loads((Path(__file__).parent / "fixtures" / "searches.json").read_text(encoding="utf-8"))
TOKENS = FIXTURES["max_tokens"]
VOCABULARY, STOP = 13, 3
BEAM_TOKENS = 14
PROMPTS = ["The with statement", "Return a new list", "def", "Changed in version 3.", "A generator is"]
BEAMS = [
    {"beam_width": 2},
    {"beam_width": 3, "length_penalty": 0.0, "early_stopping": True},
    {"beam_width": 4, "length_penalty": 2.0, "n": 3},
    {"beam_width": 5, "length_penalty": -0.5, "early_stopping": "never", "n": 2},
    {"beam_width": 2, "early_stopping": True, "n": 2},
]


@pytest.fixture(scope="module")
def expected(model):
    """Of each prompt and wish, transformers' answers and their scores."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()
    found = []
    for prompt, wish in zip(PROMPTS, BEAMS, strict=True):
        ids = model.tokenizer(prompt, return_tensors="pt")["input_ids"]
        rules = {"length_penalty": wish.get("length_penalty", 1.0), "early_stopping": wish.get("early_stopping", False)}
        rules["num_return_sequences"] = wish.get("n", 1)
        stops = list(model.eos_token_ids)
        found.append(their_beams(theirs, ids, wish["beam_width"], BEAM_TOKENS, stops, **rules))
    return found


def params(wish):
    return BeamSearchParams(max_tokens=BEAM_TOKENS, **wish)


def table(seed, heat):
    """Log-probabilities after each two tokens, float32 [13, 13, 13]; tools/search_fixtures.py makes the same."""
    drawn = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.manual_seed(seed))
    return (drawn * heat).log_softmax(-1)


def hypotheses_of(search, chances, prompt):
    """What a search comes to on a model of two tokens' context."""
    branches = [()]
    while not search.is_over:
        ahead = []
        for tokens in branches:
            before, last = [*prompt, *tokens][-2:]
            values, ids = chances[before, last].topk(min(search.num_candidates, VOCABULARY))
            ahead.append(Ahead(ids.tolist(), values.tolist(), {}))
        branches = [(*branches[place], token) for place, token in search.advance(ahead)]
    return search.hypotheses


class Chances(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A made-up model for transformers."""

    config_class = transformers.GPT2Config

    def __init__(self, chances):
        super().__init__(transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=4, n_layer=1, n_head=1))
        self.chances = chances
        self.dummy = torch.nn.Linear(1, 1)

    def forward(self, input_ids, **_):
        before = torch.cat([input_ids[:, :1], input_ids[:, :-1]], 1)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.chances[before, input_ids])

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids}


def their_beams(model, ids, width, most_tokens, stops, **options):
    """transformers' answers, each up to its end, and their scores."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, max_new_tokens=most_tokens, do_sample=False,
        eos_token_id=stops, pad_token_id=stops[0], return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    answers = []
    for tokens in out.sequences[:, ids.shape[1] :].tolist():
        ends = [place for place, token in enumerate(tokens) if token in stops]
        answers.append(tokens[: ends[0] + 1] if ends else tokens)
    return answers, out.sequences_scores.tolist()


def made_up(seed):
    return table(seed, 1.0 + seed % 3), [seed % VOCABULARY, (5 * seed + 1) % VOCABULARY]


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 2.5])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_beams_on_made_up_models(width, penalty, early):
    for seed in range(2):
        chances, prompt = made_up(seed)
        rules = {"length_penalty": penalty, "early_stopping": early}
        found = hypotheses_of(BeamSearch(width, stops=[STOP], max_tokens=12, **rules), chances, prompt)
        rules |= {"num_return_sequences": width, "use_cache": False}
        answers, scores = their_beams(Chances(chances), torch.tensor([prompt]), width, 12, [STOP], **rules)
        assert [list(each.tokens) for each in found] == answers
        assert [each.score for each in found] == pytest.approx(scores, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("early", [False, True, "never"])
def test_groups_on_made_up_models(early):
    cases = [case for case in FIXTURES["tables"] if case["early_stopping"] == early]
    assert len(cases) == 96
    for case in cases:
        chances, prompt = made_up(case["seed"])
        search = BeamGroups(
            case["width"], case["num_groups"], case["diversity_penalty"], stops=[STOP],
            max_tokens=FIXTURES["max_tokens_of_tables"], length_penalty=case["length_penalty"], early_stopping=early,
        )  # fmt: skip
        found = hypotheses_of(search, chances, prompt)
        assert [list(each.tokens) for each in found] == case["answers"]
        assert [each.score for each in found] == pytest.approx(case["scores"], rel=1e-4, abs=2e-6)


# Under pressure they are those that each request gets alone: tests/properties/test_wishes.py.
def test_the_answers_are_those_of_transformers(model, expected):
    asked = [(prompt, params(wish)) for prompt, wish in zip(PROMPTS, BEAMS, strict=True)]
    wanted = list(expected)
    for case in FIXTURES["groups"]:
        width, groups, diversity = (case[name] for name in ("beam_width", "num_groups", "diversity_penalty"))
        in_groups = {"num_beam_groups": groups, "diversity_penalty": diversity}
        asked.append((case["prompt"], BeamSearchParams(beam_width=width, n=width, max_tokens=TOKENS, **in_groups)))
        wanted.append((case["answers"], case["scores"]))
    for case in FIXTURES["contrastive"]:
        alpha, top_k = case["penalty_alpha"], case["top_k"]
        asked.append((case["prompt"], ContrastiveSearchParams(penalty_alpha=alpha, top_k=top_k, max_tokens=TOKENS)))
        wanted.append(([case["tokens"]], None))
    # Others come and go beside them, with the same prompts.
    asked += [(prompt, SamplingParams(max_tokens=20)) for prompt, _ in asked]
    llm = LLM(model)
    violations = []
    llm.engine.on_batch = lambda batch: violations.extend(llm.engine.check())
    found = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    for answer, (tokens, scores) in zip(found, wanted, strict=False):
        assert [each.token_ids for each in answer.outputs] == tokens
        if scores is not None:
            assert [each.score for each in answer.outputs] == pytest.approx(scores, rel=1e-4)
        assert answer.text == answer.outputs[0].text != ""
        assert answer.finish_reason == ("stop" if tokens[0][-1] == 0 else "length")
    assert violations == [] and llm.engine.manager.device.num_used == 0
    assert not (llm.engine.has_unfinished or llm.engine._searches or llm.engine.scheduler.has_unfinished)


def test_candidates_are_forks_of_one_answer(model):
    engine = Engine(model, block_size=4, num_blocks=400)
    prompt = list(range(1, 81))
    engine.add_request(prompt, ContrastiveSearchParams(top_k=5, max_tokens=12, ignore_eos=True))
    used = []
    while engine.has_unfinished:
        engine.step()
        used.append(engine.manager.device.num_used)
    # Five copies would hold more than a hundred blocks.
    assert max(used) <= 20 + 5 * 4


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


def test_a_prompt_that_leaves_no_room_for_candidates_is_refused_and_one_token_less_is_answered(model):
    engine = Engine(model, num_blocks=5, block_size=4)
    with pytest.raises(NeverFits, match="needs 21 tokens for its prompt, candidates for a first output and what may"):
        engine.add_request(list(range(1, 20)), ContrastiveSearchParams(ignore_eos=True))
    live = engine.live_request(engine.add_request(list(range(1, 19)), ContrastiveSearchParams(ignore_eos=True)))
    driven(engine)
    assert len(live.completion().token_ids) == 1


# At any time, and beside others: tests/properties/test_wishes.py.
@pytest.mark.parametrize(("end", "reason"), [("abort", "abort"), ("finish", "stop")])
def test_a_search_that_is_ended_says_why_and_leaves_nothing(model, end, reason):
    engine = Engine(model, block_size=4, num_blocks=40)
    engine.add_request(PROMPTS[0], params(BEAMS[2]), id="a")
    engine.step()
    ended = getattr(engine, end)("a")
    assert (ended.id, ended.finish_reason, ended.finished, ended.token_ids) == ("a", reason, True, [])
    assert not engine.has_unfinished and engine.manager.device.num_used == 0


def test_a_step_that_fails_is_taken_back_and_the_search_goes_on(model, expected):
    llm = LLM(model, block_size=4, num_blocks=40)
    calls = count(1)

    @around(llm.engine.worker, "logits")
    def now_and_then(logits, step):
        if next(calls) % 3 == 0:
            raise MemoryError("too little")
        return logits(step)

    found = llm.generate(PROMPTS, list(map(params, BEAMS)))
    assert [[each.token_ids for each in answer.outputs] for answer in found] == [tokens for tokens, _ in expected]
    assert llm.engine.stats().failed_steps > 3
