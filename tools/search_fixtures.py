"""Answers of searches that transformers' core has dropped, by the last version that had them, for tests/paged/test_search_fixtures.py.

    python -m venv /tmp/older
    /tmp/older/bin/pip install "torch>=2.10" transformers==4.49.0
    /tmp/older/bin/python tools/search_fixtures.py paged/model/checkpoint tests/paged/fixtures/searches.json

Contrastive search and beam groups left it with version 5. Runs without anything of ours: it reads the checkpoint that ships, and models made of
random tables, which are made again from their seed where they are compared.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

PROMPTS = ["The with statement", "Return a new list", "def", "Changed in version 3.", "A generator is"]
CONTRASTIVE = [(0.6, 4), (0.3, 2), (0.8, 6), (0.5, 3), (0.9, 5)]
GROUPS = [(4, 2, 0.5), (6, 3, 1.0), (4, 4, 2.0), (6, 2, 0.2), (9, 3, 5.0)]
TOKENS = 24

VOCABULARY, STOP = 13, 3
# Said by groups that are done, and it makes the same less likely for others: it is no token that could be said.
PAD, NEVER = 13, -1e9
TABLE_TOKENS = 12


def table(seed: int, heat: float) -> torch.Tensor:
    """Log-probabilities after each two tokens, float32 [13, 13, 13]."""
    drawn = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.manual_seed(seed))
    return (drawn * heat).log_softmax(-1)


class Chances(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A model of two tokens' context."""

    config_class = transformers.GPT2Config

    def __init__(self, chances: torch.Tensor) -> None:
        super().__init__(transformers.GPT2Config(vocab_size=VOCABULARY + 1, n_embd=4, n_layer=1, n_head=1))
        self.chances = torch.nn.functional.pad(chances, (0, 1, 0, 1, 0, 1), value=NEVER)
        self.dummy = torch.nn.Linear(1, 1)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        before = torch.cat([input_ids[:, :1], input_ids[:, :-1]], 1)
        return transformers.modeling_outputs.CausalLMOutput(logits=self.chances[before, input_ids])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": input_ids}


def answers(sequences: torch.Tensor, num_prompt: int, stops: list[int]) -> list[list[int]]:
    """What came after the prompt, up to a stop."""
    found = []
    for tokens in sequences[:, num_prompt:].tolist():
        ends = [place for place, token in enumerate(tokens) if token in stops]
        found.append(tokens[: ends[0] + 1] if ends else tokens)
    return found


def of_checkpoint(folder: Path) -> dict[str, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    contrastive, groups = [], []
    for prompt, (alpha, top_k), (width, num_groups, diversity) in zip(PROMPTS, CONTRASTIVE, GROUPS):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        usual = {"attention_mask": torch.ones_like(ids), "eos_token_id": 0, "pad_token_id": 1}
        out = model.generate(ids, penalty_alpha=alpha, top_k=top_k, max_new_tokens=TOKENS, **usual)
        contrastive.append(
            {
                "prompt": prompt,
                "penalty_alpha": alpha,
                "top_k": top_k,
                "tokens": answers(out, ids.shape[1], [0])[0],
            }
        )
        out = model.generate(
            ids,
            num_beams=width,
            num_beam_groups=num_groups,
            diversity_penalty=diversity,
            num_return_sequences=width,
            max_new_tokens=TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
            **usual,
        )
        groups.append(
            {
                "prompt": prompt,
                "beam_width": width,
                "num_groups": num_groups,
                "diversity_penalty": diversity,
                "answers": answers(out.sequences, ids.shape[1], [0]),
                "scores": out.sequences_scores.tolist(),
            }
        )
    return {"contrastive": contrastive, "groups": groups}


def of_tables() -> list[dict[str, Any]]:
    found = []
    for seed in range(6):
        for width, num_groups in ((4, 2), (6, 3), (3, 3), (6, 2)):
            for penalty in (-1.0, 0.6, 1.0, 2.5):
                for early in (False, True, "never"):
                    diversity = (0.3, 1.0, 4.0)[seed % 3]
                    prompt = [seed % VOCABULARY, (5 * seed + 1) % VOCABULARY]
                    out = Chances(table(seed, 1.0 + seed % 3)).generate(
                        torch.tensor([prompt]),
                        num_beams=width,
                        num_beam_groups=num_groups,
                        diversity_penalty=diversity,
                        num_return_sequences=width,
                        max_new_tokens=TABLE_TOKENS,
                        length_penalty=penalty,
                        early_stopping=early,
                        use_cache=False,
                        eos_token_id=STOP,
                        pad_token_id=PAD,
                        return_dict_in_generate=True,
                        output_scores=True,
                    )
                    found.append(
                        {
                            "seed": seed,
                            "width": width,
                            "num_groups": num_groups,
                            "diversity_penalty": diversity,
                            "length_penalty": penalty,
                            "early_stopping": early,
                            "answers": answers(out.sequences, 2, [STOP]),
                            "scores": [round(score, 6) for score in out.sequences_scores.tolist()],
                        }
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    report = {
        "made_by": "tools/search_fixtures.py",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "max_tokens": TOKENS,
        **of_checkpoint(args.checkpoint),
        "max_tokens_of_tables": TABLE_TOKENS,
        "tables": of_tables(),
    }
    lines = (
        json.dumps(report, separators=(",", ":")).replace('{"seed"', '\n{"seed"').replace('{"prompt"', '\n{"prompt"')
    )
    args.out.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
