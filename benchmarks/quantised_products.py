"""Weights in 8 and 4 bits: products alone, and whole models, beside bfloat16.

    python benchmarks/quantised_products.py        # writes results/quantised-weights.md

Seconds are those of the processor on one thread, so that others on the machine cost little; formats take turns, and a figure is the median of its rounds
with their range. Models have random weights: what a step takes does not depend on what they say.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from spread import spread

from paged import Engine, SamplingParams
from paged.model.machine import machine
from paged.model.model_shape import ModelShape
from paged.model.native.coded import PackedCodes, coded_library
from paged.model.native.large_pages import on_large_pages
from paged.model.native.packed import multiply, pack
from paged.model.quantised.names import BITS, GROUPS, QUANTIZATIONS
from paged.model.quantised.weights import quantise
from paged.model.random_weights import random_model

RESULTS = Path(__file__).resolve().parent / "results" / "quantised-weights.md"
FORMATS = (None, *QUANTIZATIONS)
# And whether the output projection is codes, too.
WHOLE = ((None, False), *((name, with_head) for name in QUANTIZATIONS for with_head in (False, True)))
ROWS = (1, 8, 32, 512)
_COMMON = {"max_length": 8192, "tied_embeddings": True, "head_dim": 64}
SHAPES = [
    ModelShape(name="135m", hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=49152, **_COMMON),
    ModelShape(name="0.5b", hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864, vocab=151936, **_COMMON),
]
# More than a cache of the second level holds, as bfloat16.
BYTES = 24 * 2**20
NEW = 8

app = typer.Typer(add_completion=False)


def seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def often(times: int, work: Callable[[], object]) -> None:
    for _ in range(times):
        work()


def in_turns(works: dict[str | None, Callable[[], object]], rounds: int) -> dict[str | None, list[float]]:
    """Seconds of each, round by round; the first one is not counted."""
    found: dict[str | None, list[float]] = {name: [] for name in works}
    for number in range(1 + rounds):
        for name, work in works.items():
            took = seconds(work)
            if number:
                found[name].append(took)
    return found


def products(shape: ModelShape, rounds: int) -> list[str]:
    """Rows of the table of products: gate and up, and down."""
    lines, drawn = [], torch.Generator().manual_seed(0)
    columns = coded_library().paged_columns()
    for outs, depth in ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)):
        weight = torch.randn(outs, depth, generator=drawn)
        codes = {
            name: PackedCodes(quantise(weight, bits=BITS[name], group_size=GROUPS[name]), columns)
            for name in QUANTIZATIONS
        }
        floats = on_large_pages(pack(weight.bfloat16(), columns))
        for rows in ROWS:
            x = torch.randn(rows, depth, generator=drawn).bfloat16()
            # As often as weights of another layer each would fill the memory that a step reads.
            times = max(1, BYTES // (2 * outs * depth)) if rows < ROWS[-1] else 1

            works: dict[str | None, Callable[[], object]] = {
                None: partial(often, times, partial(multiply, x, floats, None, outs))
            }
            works |= {name: partial(often, times, partial(each.multiply, x, None)) for name, each in codes.items()}
            found = in_turns(works, rounds)
            cells = [spread([each / times * 1e6 for each in found[name]], ",.0f") for name in FORMATS]
            ratio = [np.median(found[None]) / np.median(found[name]) for name in QUANTIZATIONS]
            lines.append(
                f"| {outs} × {depth} | {rows} | {' | '.join(cells)} | {' and '.join(f'{each:.1f} ×' for each in ratio)} |"
            )
    return lines


def whole(shape: ModelShape, rounds: int) -> list[str]:
    """Rows of the table of models: a prompt of 512, then what 1, 8 and 32 sequences decode behind 64 tokens each."""
    engines = {
        (name, with_head): Engine(
            random_model(shape, dtype="bfloat16", quantization=name, quantize_head=with_head),
            num_blocks=512,
            max_sequences=32,
            max_tokens_per_step=2048,
            prefix_caching=False,
        )
        for name, with_head in WHOLE
    }
    ids = np.random.default_rng(0).integers(3, 1000, 512).tolist()
    lines = []
    for what, count, prompt in (("prompt of 512", 1, 512), *((f"{n} decoding", n, 64) for n in (1, 8, 32))):
        rates: dict[tuple[str | None, bool], list[float]] = {each: [] for each in WHOLE}
        for number in range(1 + rounds):
            for name, engine in engines.items():
                rate = rate_of(engine, ids[:prompt], count, decodes=prompt < 512)
                if number:
                    rates[name].append(rate)
        lines.append(f"| {shape.name} | {what} | {' | '.join(spread(rates[each], ',.0f') for each in WHOLE)} |")
    return lines


def rate_of(engine: Engine, prompt: list[int], count: int, *, decodes: bool) -> float:
    """Tokens a second of the processor: of the prompt, or of NEW steps behind it."""
    for _ in range(count):
        engine.add_request(prompt, SamplingParams(max_tokens=1 + NEW, temperature=0, ignore_eos=True))
    took = seconds(engine.step)
    if decodes:
        took = sum(seconds(engine.step) for _ in range(NEW))
    tokens = count * NEW if decodes else len(prompt)
    while engine.has_unfinished:
        engine.step()
    return tokens / took


@app.command()
def main(rounds: Annotated[int, typer.Option(min=1)] = 7, models: str = "135m,0.5b", out: Path = RESULTS) -> None:
    """Measure, and write the page; `models`: the shapes that are run whole, too."""
    torch.set_num_threads(1)
    lines = [PAGE, f"{machine()['processor']}, one thread, {rounds} rounds.", ""]
    heads = "bfloat16 | int8 | int4 | int8 and int4 against bfloat16 |"
    lines += ["## Products, µs", "", f"| results × inputs | rows | {heads}", "|---|--:|--:|--:|--:|--:|"]
    for shape in SHAPES:
        lines += products(shape, rounds)
    heads = "bfloat16 | int8 | int8, head too | int4 | int4, head int8 |"
    lines += ["", "## Models, tokens a second", "", f"| shape | step | {heads}", "|---|---|--:|--:|--:|--:|--:|"]
    for shape in [each for each in SHAPES if each.name in models.split(",")]:
        lines += whole(shape, rounds)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


PAGE = """# Weights in 8 and 4 bits

`python benchmarks/quantised_products.py` wrote this page. Seconds are those of the processor on one thread; a figure is the median of its rounds,
with their range. Embeddings are bfloat16, and so is the output projection where nothing else is said. Rows are rounded to 8 bits, whatever their number.
"""


if __name__ == "__main__":
    app()
