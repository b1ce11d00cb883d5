"""Sampling a batch of rows: all settings on, beside transformers' processors row by row; and none, beside a plain softmax.

    python benchmarks/sampling.py            # writes results/sampling.md

Both sides get the same logits and the same histories, and take turns. transformers' processors stand in the order of
its `generate`; presence and frequency penalties are OpenAI's, which it lacks: its side goes without. Decides nothing
about a result.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import typer
from spread import spread
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paged.model.machine import machine
from paged.sampling import SamplingParams
from paged.sampling.adjustments import NO_LANE
from paged.sampling.rows import RowSampling

RESULTS = Path(__file__).resolve().parent / "results" / "sampling.md"
PROMPT, OUTPUT = 200, 100
THEIRS = "transformers' processors, row by row"
ALL = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
}
app = typer.Typer(add_completion=False)


def times(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, which take turns; the first round does not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if number:
                found[name].append(time.perf_counter() - started)
    return found


@app.command()
def main(rows: int = 256, vocabulary: int = 128_000, rounds: int = 5) -> None:
    """Time both, and write the page."""
    chance = np.random.default_rng(0)
    logits = torch.randn(rows, vocabulary, generator=torch.manual_seed(0)) * 3
    histories = chance.integers(0, vocabulary, (rows, PROMPT + OUTPUT)).astype(np.int32)
    places = np.full(rows, OUTPUT)

    def sampling(params: SamplingParams) -> RowSampling:
        columns = RowSampling()
        for row in range(rows):
            lane = columns.adjustments.open(params, histories[row, :PROMPT].tolist())
            columns.set(row, params, seed=row, prompt_len=PROMPT, lane=lane, reader=None)
            if lane != NO_LANE:
                numbers = np.full(OUTPUT, columns.adjustments.number_of(lane))
                columns.adjustments.note(np.full(OUTPUT, lane), np.arange(OUTPUT), histories[row, PROMPT:], numbers)
        return columns

    every, drawn, plain = (
        sampling(SamplingParams(**wishes)) for wishes in (ALL, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}, {})
    )
    asked = np.arange(rows)
    known = torch.from_numpy(histories.astype(np.int64))
    theirs = (
        RepetitionPenaltyLogitsProcessor(ALL["repetition_penalty"]),
        TemperatureLogitsWarper(ALL["temperature"]),
        TopKLogitsWarper(int(ALL["top_k"])),
        TopPLogitsWarper(ALL["top_p"]),
    )

    def row_by_row() -> None:
        for row in range(rows):
            scores = logits[row : row + 1]
            for processor in theirs:
                scores = processor(known[row : row + 1], scores)
            torch.multinomial(scores.softmax(-1), 1)

    # Ours changes logits in place: a run begins with those that the one before left, of the same kind.
    changed = logits.clone()
    ways: dict[str, Callable[[], object]] = {
        "all settings on": lambda: every.choose(changed, every.of(asked), places),
        "the same without penalties": lambda: drawn.choose(logits, drawn.of(asked), places),
        "greedy, nothing on": lambda: plain.choose(logits, plain.of(asked), places),
        "a plain softmax": lambda: logits.softmax(-1),
    }
    found = times(ways, rounds)
    found[THEIRS] = times({"theirs": row_by_row}, 2)["theirs"]
    its = machine()
    middle = {name: float(np.median(values)) for name, values in found.items()}
    lines = [
        "# Sampling",
        "",
        f"{its['processor']}, {its['cores']} cores, Python {its['python']}, torch {its['torch']}, transformers {its['transformers']}; {torch.get_num_threads()} threads. "
        f"{rows} rows, a vocabulary of {vocabulary:,}, float32, {PROMPT} prompt and {OUTPUT} output tokens a row. Milliseconds a batch, {rounds} runs, in turns.",
        "",
        "```",
        "python benchmarks/sampling.py",
        "```",
        "",
        "| | ms |",
        "|---|--:|",
        *(f"| {name} | {spread([1000 * value for value in values])} |" for name, values in found.items()),
        "",
        f"All settings on (temperature, top-k, top-p, repetition, presence and frequency): {middle[THEIRS] / middle['all settings on']:.0f} × faster than row by row (goal 20 ×). "
        f"Greedy: {middle['greedy, nothing on'] / middle['a plain softmax']:.2f} × a plain softmax (goal 2 ×).",
        "",
    ]
    RESULTS.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    app()
