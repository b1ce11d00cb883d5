"""Beam search on made-up models, where transformers' own `generate` says what is right."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from paged.decoding.beams import BeamSearch  # noqa: E402

from .searching import STOP, VOCABULARY, hypotheses_of, table  # noqa: E402, TID252


class Chances(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A model of two tokens' context."""

    config_class = transformers.GPT2Config

    def __init__(self, chances):
        super().__init__(transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=4, n_layer=1, n_head=1))
        self.chances = chances
        self.dummy = torch.nn.Linear(1, 1)

    def forward(self, input_ids, **_):
        before = torch.cat([input_ids[:, :1], input_ids[:, :-1]], 1)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.chances[before, input_ids])

    def prepare_inputs_for_generation(self, input_ids, **_):
        return {"input_ids": input_ids}

    def _supports_default_dynamic_cache(self):
        return False


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 2.5])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_the_answers_are_those_of_transformers(width, penalty, early):
    for seed in range(2):
        chances = table(seed, 1.0 + seed % 3)
        prompt = [seed % VOCABULARY, (5 * seed + 1) % VOCABULARY]
        found = hypotheses_of(
            BeamSearch(width, stops=[STOP], max_tokens=12, length_penalty=penalty, early_stopping=early),
            chances,
            prompt,
        )
        theirs = Chances(chances).generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            length_penalty=penalty,
            early_stopping=early,
            do_sample=False,
            use_cache=False,
            eos_token_id=STOP,
            pad_token_id=STOP,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for hypothesis, tokens, score in zip(
            found, theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True
        ):
            expected = tokens[2:]
            if STOP in expected:
                expected = expected[: expected.index(STOP) + 1]
            assert list(hypothesis.tokens) == expected
            assert hypothesis.score == pytest.approx(score, rel=1e-4, abs=1e-5)
