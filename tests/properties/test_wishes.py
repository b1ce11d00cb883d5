"""Everything that a sequence may do, at once, on memory that is too small: samplers, several answers, searches, drafts, aborts.

What each request gets alone, in ample memory and without drafts, is what it has to get: tokens, log-probabilities and scores, to the last bit.
The machine has to reach what matters: each event named here is expected in a share of the examples.
"""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from paged import BeamSearchParams, ContrastiveSearchParams, Costs, Engine, SamplingParams  # noqa: E402
from paged.testing.machines import settings_for  # noqa: E402
from paged.testing.reserving import most_blocks  # noqa: E402
from paged.testing.tiny_model import tiny_model  # noqa: E402

from ..driving import driven  # noqa: E402, TID252

VOCABULARY = 8
MOST_LIVE = 6
LONGEST = 17
MODEL = tiny_model(VOCABULARY)
DRAFT = tiny_model(VOCABULARY, 0.03)
# About a third of the usual share; Hypothesis draws from constants in the source, too, so a new module shifts them all.
SHARES = {
    0.3: "abort",
    0.2: "drafts wrong",
    0.15: "preempted, drafts right, a beam search, a contrastive search",
    0.1: "hit, finish, stopped",
    0.08: "answers of several",
    0.05: "groups",
    0.01: "swapped",
}


@st.composite
def wishes(draw):
    """Parameters of a request, of any kind."""
    length = draw(st.integers(1, 8))
    stops = draw(st.sampled_from([(), (), (3,), (5, 6)]))
    kind = draw(st.sampled_from(["sampled", "sampled", "sampled", "beams", "groups", "contrastive"]))
    if kind == "contrastive":
        return ContrastiveSearchParams(
            penalty_alpha=draw(st.sampled_from([0.3, 0.6, 1.0])),
            top_k=draw(st.integers(2, 4)),
            max_tokens=length,
            stop_token_ids=stops,
        )
    if kind in ("beams", "groups"):
        groups = {"num_beam_groups": 2, "diversity_penalty": draw(st.sampled_from([0.3, 2.0]))}
        width = draw(st.sampled_from([2, 3, 4] if kind == "beams" else [2, 4]))
        return BeamSearchParams(
            beam_width=width,
            n=draw(st.integers(1, width)),
            max_tokens=length,
            stop_token_ids=stops,
            length_penalty=draw(st.sampled_from([0.0, 1.0, 2.0])),
            early_stopping=draw(st.sampled_from([False, True, "never"])),
            **(groups if kind == "groups" else {}),
        )
    fields = {}
    if draw(st.booleans()):
        fields = {
            "temperature": draw(st.sampled_from([0.7, 3.0])),
            "seed": draw(st.integers(0, 3)),
            "n": draw(st.integers(1, 3)),
            "top_k": draw(st.sampled_from([None, 3])),
            "top_p": draw(st.sampled_from([None, 0.8])),
        }
        fields["best_of"] = draw(st.sampled_from([None, fields["n"], fields["n"] + 1]))
    penalties = st.sampled_from(
        [
            {},
            {},
            {"repetition_penalty": 1.4},
            {"presence_penalty": 0.5, "frequency_penalty": 0.25},
            {"no_repeat_ngram_size": 2},
            {"logit_bias": {2: 3.0, 5: -4.0}},
            {"allowed_token_ids": (0, 1, 4)},
            {"bad_words": ((1,), (2, 2))},
        ]
    )
    return SamplingParams(
        **fields,
        **draw(penalties),
        max_tokens=length,
        min_tokens=draw(st.sampled_from([0, 0, min(2, length)])),
        stop_token_ids=stops,
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
    )


@st.composite
def worlds(draw):
    """An engine's options: a pool in which the largest request just fits."""
    size = draw(st.sampled_from([1, 2, 4]))
    options = {
        "block_size": size,
        "num_blocks": -(-draw(st.sampled_from([20, 28, 36, 60])) // size),
        "host_blocks": draw(st.sampled_from([0, 20, 20, 40])),
        "prefix_caching": draw(st.sampled_from([True, True, False])),
        "max_tokens_per_step": draw(st.sampled_from([5, 9, 40])),
        "max_sequences": draw(st.sampled_from([4, 6, 12])),
        "policy": draw(st.sampled_from(["paged", "paged", "paged", "vllm", "fastgen", "sarathi", "orca-max"])),
    }
    if options["host_blocks"]:
        # Whoever has to go is copied.
        options["costs"] = Costs(seconds_per_token=1.0)
    speculate = draw(st.sampled_from([None, "lookup", "lookahead", "draft", "draft"]))
    if speculate:
        options |= {
            "speculate": speculate,
            "num_drafts": draw(st.sampled_from([6, 9] if speculate == "lookahead" else [1, 3, 9])),
        }
    if speculate == "draft":
        options["draft_model"] = DRAFT
    return options


ALONE = {}


def told(live):
    completion = live.completion()
    outputs = [
        (each.token_ids, each.finish_reason, each.stop_reason, each.logprobs, each.cumulative_logprob, each.score)
        for each in completion.outputs
    ]
    return outputs, completion.prompt_logprobs


def alone(prompt, params):
    key = (tuple(prompt), repr(params))
    if key not in ALONE:
        engine = Engine(MODEL, num_blocks=400, block_size=4, max_sequences=64, max_tokens_per_step=512)
        live = engine.live_request(engine.add_request(prompt, params, id="alone"))
        driven(engine)
        ALONE[key] = told(live)
    return ALONE[key]


class Wishes(RuleBasedStateMachine):
    """Clients of one engine."""

    def __init__(self):
        super().__init__()
        self.events = Counter()

    @initialize(options=worlds(), opening=st.lists(wishes(), min_size=1, max_size=3))
    def begin(self, options, opening):
        self.options = options
        self.engine = Engine(MODEL, max_model_len=LONGEST, **options)
        self.live, self.num_added = {}, 0
        for params in opening:
            self.add([1, 2, 1, 2], params)

    @precondition(lambda self: len(self.live) < MOST_LIVE)
    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=8), params=wishes())
    def add(self, prompt, params):
        several = getattr(params, "num_sequences", 1)
        # A search says one token less than it is let.
        length = len(prompt) + params.max_tokens + 1
        room = most_blocks(self.options["policy"], self.options["num_blocks"])
        if (
            length > LONGEST
            or several > self.options["max_sequences"]
            or several * -(-length // self.options["block_size"]) > room
        ):
            # Its answer would be cut, or refused.
            return
        self.num_added += 1
        id = self.engine.add_request(prompt, params, id=f"r{self.num_added}")
        self.live[id] = (self.engine.live_request(id), prompt, params)
        self.check()

    @precondition(lambda self: len(self.live) < MOST_LIVE)
    @rule(params=wishes(), more=st.lists(st.integers(0, 2), max_size=2))
    def arrive_together(self, params, more):
        """Two that begin alike."""
        self.add([1, 2, 0, 1, 2, 0], params)
        self.add([1, 2, 0, 1, 2, 0, *more], params)

    @precondition(lambda self: len(self.live) < MOST_LIVE - 1)
    @rule(params=wishes(), steps=st.integers(2, 8))
    def crowd(self, params, steps):
        """Prompts that grow until they are in each other's way."""
        for first in (0, 1, 2):
            self.add([first, 2, 2, 1], SamplingParams(max_tokens=8))
        self.add([1, 2, 0, 1], params)
        self.serve(steps)

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(steps=st.integers(1, 6))
    def serve(self, steps):
        for _ in range(steps):
            self.engine.step()
            self.check()
            self.collect()

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 3), way=st.sampled_from(["abort", "finish"]))
    def end(self, pick, way):
        id = sorted(self.live)[pick % len(self.live)]
        getattr(self.engine, way)(id)
        del self.live[id]
        self.events[way] += 1
        self.check()

    def check(self):
        assert self.engine.check() == []

    def collect(self):
        """Whoever has ended got what he gets alone."""
        for id, (live, prompt, params) in list(self.live.items()):
            if live.last is None:
                continue
            del self.live[id]
            assert told(live) == alone(prompt, params), (id, prompt, params)
            usage = live.last.usage
            self.events["preempted"] += usage.preemptions > 0
            self.events["swapped"] += usage.swapped_blocks > 0
            self.events["hit"] += usage.hit_tokens > 0
            self.events["stopped"] += any(each.finish_reason == "stop" for each in live.sequences)
            self.events["answers of several"] += getattr(params, "num_sequences", 1) > 1
            self.events["a beam search"] += hasattr(params, "beam_width")
            self.events["groups"] += getattr(params, "num_beam_groups", 1) > 1
            self.events["a contrastive search"] += hasattr(params, "penalty_alpha")

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(600):
            if not self.engine.has_unfinished:
                break
            self.engine.step()
            self.check()
            self.collect()
        assert not self.live and not self.engine.has_unfinished
        manager, stats = self.engine.manager, self.engine.scheduler.stats()
        assert (manager.device.num_used, manager.host.num_used, bool(self.engine._searches)) == (0, 0, False)
        assert not self.engine._sampling.adjustments._number.any(), "no lane is left"
        self.events["drafts right"] += stats.accepted_tokens > 0
        self.events["drafts wrong"] += stats.drafted_tokens > stats.accepted_tokens


def test_everybody_gets_what_he_gets_alone_whatever_he_wishes(reached_by):
    reached = reached_by(Wishes)
    run_state_machine_as_test(reached.machine, settings=settings_for(120, steps=12))
    assert reached.below(SHARES) == {}
