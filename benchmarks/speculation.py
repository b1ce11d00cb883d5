"""Drafts: steps and time with them and without, on text that repeats itself and on text that does not.

    python benchmarks/speculation.py         # writes results/speculation.md

The model is the one that ships, which knows Python's documentation by heart; the draft model is a quarter of it, made by the same tool of the same
text. A prompt that repeats itself is a paragraph of it, and the beginning of the same paragraph again; one that does not is the beginning alone. Every
way gives the same tokens, which is checked. They take turns.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data import topics

import numpy as np
import typer
from spread import spread

from paged import LLM, SamplingParams, load_model
from paged.model.checkpoint import checkpoint_path
from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "speculation.md"
# All of it within the windows of 192 tokens that the model was trained on.
PARAGRAPH, BEGINNING, OUTPUT = 80, 16, 64
WAYS = {
    None: "none",
    "lookup": "from the text (lookup)",
    "draft": "by a smaller model (draft)",
    "lookahead": "lookahead",
}
app = typer.Typer(add_completion=False)


def prompts_of(tokenizer: object, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that repeat themselves, and their ends."""
    text = "\n\n".join(topics.topics[name].strip() for name in sorted(topics.topics))
    encode = tokenizer.encode  # type: ignore[attr-defined]
    each = (encode(part, verbose=False) for part in text.split("\n\n") if part[:1].isalpha())
    whole = [ids[:PARAGRAPH] for ids in each if len(ids) >= PARAGRAPH][:count]
    assert len(whole) == count, f"{len(whole)} paragraphs are long enough"
    return [ids + encode("\n\n") + ids[:BEGINNING] for ids in whole], [ids[:BEGINNING] for ids in whole]


def run(llm: LLM, prompts: Sequence[list[int]], temperature: float) -> tuple[list[list[int]], int, float]:
    """Answers, tokens' rows that were sampled from, and seconds."""
    rows = 0

    def count(batch: object) -> None:
        nonlocal rows
        rows += int(batch.samples.sum())  # type: ignore[attr-defined]

    llm.engine.on_batch = count
    drawn = {"temperature": temperature, "seed": 1} if temperature else {}
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **drawn)
    started = time.perf_counter()
    found = llm.generate(prompts, params, use_tqdm=False)
    return [each.token_ids for each in found], rows, time.perf_counter() - started


@app.command()
def main(count: int = 16, rounds: int = 5) -> None:
    """Time all, and write the page."""
    model, lines = load_model(checkpoint_path()), []
    for at_once in (1, 8):
        for name, which, temperature in (
            ("repeats itself", 0, 0.0),
            ("does not", 1, 0.0),
            ("does not, drawn at temperature 0.8", 1, 0.8),
        ):
            rates: dict[str | None, list[float]] = {way: [] for way in WAYS}
            steps, right = {}, {}
            for number in range(rounds + 1):
                answers = {}
                ways = list(WAYS)
                for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                    llm = LLM(model, speculate=way, max_sequences=at_once, prefix_caching=False)
                    prompts = prompts_of(llm.get_tokenizer(), count)[which]
                    answers[way], rows, took = run(llm, prompts, temperature)
                    stats = llm.engine.stats()
                    steps[way] = count * OUTPUT / rows
                    right[way] = stats.accepted_tokens / max(1, stats.drafted_tokens)
                    if number:
                        rates[way].append(count * OUTPUT / took)
                assert all(each == answers[None] for each in answers.values()), "drafts change no answer"
            plain = np.median(rates[None])
            for way, words in WAYS.items():
                gain = float(np.median(rates[way]) / plain)
                share = f"{right[way]:.0%}" if way else ""
                lines.append(
                    f"| {name} | {at_once} | {words} | {steps[way]:.2f} | {share} | {spread(rates[way], ',.0f')} | {gain:.2f} × |"
                )
    its = machine()
    page = [
        "# Drafts",
        "",
        f"{its['processor']}, {its['cores']} cores, Python {its['python']}, torch {its['torch']}. The model that ships, batch-invariant; {count} prompts, {OUTPUT} tokens each, {rounds} runs, in turns.",
        f"A prompt that repeats itself is a paragraph of Python's documentation, {PARAGRAPH} tokens of it, and the first {BEGINNING} again; one that does not is the first {BEGINNING} alone. The answers are the same with drafts and without. The draft model has 213,440 parameters, the model 918,656.",
        "",
        "```",
        "python benchmarks/speculation.py",
        "```",
        "",
        "| text | rows at once | drafts | tokens a step and row | drafts that were right | tokens/s | gain |",
        "|---|--:|---|--:|--:|--:|--:|",
        *lines,
        "",
        "The goal is 1.5 tokens a step on text that repeats itself, and a gain in tokens/s, from the text. A model this small costs hardly more than what is around a step, so that a draft model which saves steps costs time here: it is called once a draft.",
        "",
    ]
    RESULTS.write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    app()
