"""Drafts from a sequence's own text: steps and time with them and without, on text that repeats itself and on text that does not.

    python benchmarks/speculation.py         # writes results/speculation.md

The model is the one that ships, which knows Python's documentation by heart. A prompt that repeats itself is a paragraph of it, and the beginning
of the same paragraph again; one that does not is the beginning alone. Both ways give the same tokens, which is checked. They take turns.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics

import numpy as np
import typer
from spread import spread

from paged import LLM, SamplingParams
from paged.profiling.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "speculation.md"
BEGINNING, OUTPUT = 24, 96
app = typer.Typer(add_completion=False)


def prompts_of(tokenizer: object, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that repeat themselves, and their ends."""
    text = "\n\n".join(topics.topics[name].strip() for name in sorted(topics.topics))
    paragraphs = [each for each in text.split("\n\n") if each[:1].isalpha() and len(each) > 500][::7][:count]
    ids = [tokenizer.encode(each + "\n\n", verbose=False)[:200] for each in paragraphs]  # type: ignore[attr-defined]
    return [each + each[:BEGINNING] for each in ids], [each[:BEGINNING] for each in ids]


def run(llm: LLM, prompts: Sequence[list[int]]) -> tuple[list[list[int]], int, float]:
    """Answers, steps that a row took part in beyond its prompt, and seconds."""
    rows = 0

    def count(batch: object) -> None:
        nonlocal rows
        rows += int(batch.samples.sum())  # type: ignore[attr-defined]

    llm.engine.on_batch = count
    started = time.perf_counter()
    found = llm.generate(prompts, SamplingParams(max_tokens=OUTPUT, ignore_eos=True))
    return [each.token_ids for each in found], rows, time.perf_counter() - started


@app.command()
def main(count: int = 16, rounds: int = 5) -> None:
    """Time both, and write the page."""
    lines = []
    for at_once in (1, 8):
        for name, which in (("repeats itself", 0), ("does not", 1)):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            rows, right = {}, 0.0
            for number in range(rounds + 1):
                answers = {}
                for drafts in (False, True) if number % 2 else (True, False):
                    llm = LLM(speculate="lookup" if drafts else None, max_sequences=at_once, prefix_caching=False)
                    prompts = prompts_of(llm.get_tokenizer(), count)[which]
                    answers[drafts], rows[drafts], took = run(llm, prompts)
                    if drafts:
                        stats = llm.engine.stats()
                        right = stats.accepted_tokens / max(1, stats.drafted_tokens)
                    if number:
                        seconds[drafts].append(took)
                assert answers[False] == answers[True], "drafts change no answer"
            tokens = count * OUTPUT
            rates = {way: [tokens / each for each in values] for way, values in seconds.items()}
            gain = float(np.median(rates[True]) / np.median(rates[False]))
            lines.append(
                f"| {name} | {at_once} | {tokens / rows[True]:.2f} | {right:.0%} | {spread(rates[False], ',.0f')} | {spread(rates[True], ',.0f')} | {gain:.2f} × |"
            )
    its = machine()
    page = [
        "# Drafts from the text itself",
        "",
        f"{its['processor']}, {its['cores']} cores, Python {its['python']}, torch {its['torch']}. The model that ships, batch-invariant; {count} prompts, {OUTPUT} tokens each, {rounds} runs, in turns.",
        "A prompt that repeats itself is a paragraph of Python's documentation and the beginning of it again. The answers are the same with drafts and without.",
        "",
        "```",
        "python benchmarks/speculation.py",
        "```",
        "",
        "| text | rows at once | tokens a step and row | drafts that were right | tokens/s without | tokens/s with | gain |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *lines,
        "",
        "The goal is 1.5 tokens a step on text that repeats itself, and a gain in tokens/s.",
        "",
    ]
    RESULTS.write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    app()
