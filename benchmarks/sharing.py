"""Blocks that several sequences of a request share: used ones against copies of their own, for answers drawn in parallel and for beams.

    python benchmarks/sharing.py         # writes results/sharing.md

Lengths are drawn around the means that the vLLM paper gives for Alpaca and ShareGPT; prompts are of Python's documentation, and the model that
ships answers. After each step: blocks that all tables name, added up, and blocks that are used.
"""

import random
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import typer

from paged import BeamSearchParams, Engine, LoadedModel, SamplingParams, load_model
from paged.model.checkpoint import checkpoint_path
from paged.model.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "sharing.md"
# Mean prompt and output tokens, and what the paper saved: W. Kwon et al., "Efficient memory management for large language model serving with
# PagedAttention", 2023, figures 11 and 15 and section 6.3.
LENGTHS = {
    "Alpaca": (19.3, 58.5, "6.1 to 9.8 %", "37.6 to 55.2 %"),
    "ShareGPT": (161.3, 337.9, "16.2 to 30.5 %", "44.3 to 66.3 %"),
}
SPREAD = 0.6
TEMPERATURES = {"drawn": 1.0, "drawn, hot": 5.0}
app = typer.Typer(add_completion=False)


def requests(model: LoadedModel, name: str, count: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts, and tokens of their answers: lengths of a lognormal law."""
    chance = random.Random(seed)
    text: list[int] = model.tokenizer.encode(
        "\n\n".join(topics.topics[each].strip() for each in sorted(topics.topics)), verbose=False
    )
    found = []
    for _ in range(count):
        lengths = [
            min(480, max(2, round(chance.lognormvariate(np.log(mean) - SPREAD**2 / 2, SPREAD))))
            for mean in LENGTHS[name][:2]
        ]
        start = chance.randrange(len(text) - lengths[0])
        found.append((text[start : start + lengths[0]], lengths[1]))
    return found


def saved(model: LoadedModel, asked: list[tuple[list[int], Any]]) -> float:
    """The share of blocks that are saved, over all steps."""
    engine = Engine(model, num_blocks=6_000, max_sequences=128, max_tokens_per_step=512)
    named = used = 0

    def count(_: object) -> None:
        nonlocal named, used
        manager = engine.manager
        named += int(manager.rows.num_blocks[engine.scheduler.running_rows()].sum())
        used += manager.device.num_used

    engine.on_batch = count
    for prompt, params in asked:
        engine.add_request(prompt, params)
    while engine.has_unfinished:
        engine.step()
    return 1 - used / named


@app.command()
def main(seeds: int = 3) -> None:
    """Count, and write the page."""
    model, lines = load_model(checkpoint_path()), []
    for name, (_, _, parallel, beams) in LENGTHS.items():
        for kind, theirs in (("drawn, hot", parallel), ("drawn", parallel), ("beams", beams)):
            for width in (2, 4, 6):
                shares = []
                for seed in range(seeds):
                    asked: list[tuple[list[int], Any]] = []
                    for number, (prompt, length) in enumerate(requests(model, name, 24, seed)):
                        if kind == "beams":
                            params: Any = BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True)
                        else:
                            params = SamplingParams(
                                n=width, temperature=TEMPERATURES[kind], seed=number, max_tokens=length, ignore_eos=True
                            )
                        asked.append((prompt, params))
                    shares.append(100 * saved(model, asked))
                print(name, kind, width, shares, flush=True)
                lines.append(
                    f"| {name} | {kind} | {width} | {np.median(shares):.1f} % ({min(shares):.1f} to {max(shares):.1f}) | {theirs} |"
                )
    its = machine()
    page = [
        "# Blocks that several sequences share",
        "",
        f"{its['processor']}, {its['cores']} cores, Python {its['python']}, torch {its['torch']}. The model that ships, blocks of 16 tokens, 24 requests at once, {seeds} seeds.",
        "Saved: of the blocks that all tables of running sequences name, those that are not used because another table names them, too; over all steps.",
        "",
        "```",
        "python benchmarks/sharing.py",
        "```",
        "",
        "| lengths as | sequences | a request | saved here, median (spread of seeds) | vLLM's paper, 2 to 6 sequences |",
        "|---|---|--:|--:|--:|",
        *lines,
        "",
        "Lengths are lognormal around the paper's means; its own were of the data, with OPT-13B. Full blocks of a prompt are shared, its last, partial one is not: each of several drawn answers computes it. Hot ones (temperature 5) have nothing else in common, as the paper counts; at temperature 1 the model, which knows its text by heart, often says the same, and blocks of the same content are one. Beams copy the partial one when they fork. How much beams share of what they wrote depends on the model: the one that ships is sure of its text, and its beams part late.",
        "",
    ]
    RESULTS.write_text("\n".join(page))
    print("\n".join(page))


if __name__ == "__main__":
    app()
