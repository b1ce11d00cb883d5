"""transformers' continuous batching on our scheduler: one call for a manager, and every answer is the one that `generate` gives.

    python examples/transformers_batching.py      # needs the extra engine

Sixteen requests, half of which share a long beginning, run with all the memory that they could want, with a third of it, and with so little
that tails of requests are given up and computed again. No token of any answer changes.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig

from paged.integrations.transformers import Installed, install
from paged.model.checkpoint import checkpoint_path

NUM_TOKENS, PAGE_SIZE = 24, 16


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    beginning = (
        "The with statement is used to wrap the execution of a block with methods defined by a context manager. " * 3
    )
    return [
        tokenizer.encode((beginning if i % 2 else "") + f"In case {i}, return a new list of {i * 7}") for i in range(16)
    ]


def answered(model: Any, asked: list[list[int]], num_blocks: int) -> tuple[list[list[int]], Installed]:
    """The answers of `generate_batch` on so many blocks, and what ran it."""
    sizes = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, num_blocks=num_blocks, max_batch_tokens=256, max_requests_per_batch=40
    )
    installed = install(model.init_continuous_batching(continuous_batching_config=sizes))
    try:
        found = model.generate_batch(asked, max_new_tokens=NUM_TOKENS)
    finally:
        model.destroy_cached_continuous_batching_manager()
    return [output.generated_tokens for output in found.values()], installed


def alone(model: Any, prompt: list[int]) -> list[int]:
    given = torch.tensor([prompt])
    found = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=NUM_TOKENS)
    answer: list[int] = found[0, len(prompt) :].tolist()
    return answer


def main() -> dict[str, int]:
    """How many answers are not those of `generate`, by how much memory there is."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32)
    model.eval().generation_config.do_sample = False
    asked, different = prompts(), {}
    expected = [alone(model, prompt) for prompt in asked]
    wanted = sum(-(-(len(prompt) + NUM_TOKENS) // PAGE_SIZE) for prompt in asked)
    for name, num_blocks in (("ample", wanted), ("a third", wanted * 35 // 100), ("starved", wanted // 8)):
        answers, installed = answered(model, asked, num_blocks)
        different[name] = sum(answer != right for answer, right in zip(answers, expected, strict=True))
        stats = installed.decisions.stats()
        print(
            f"{name}: {num_blocks} blocks, {stats.computed_tokens} tokens computed ({stats.recomputed_tokens} again), "
            f"{stats.hit_tokens + stats.shared_in_flight_tokens} shared, {different[name]} of {len(asked)} answers differ"
        )
    return different


if __name__ == "__main__":
    main()
