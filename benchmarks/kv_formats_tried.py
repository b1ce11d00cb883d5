"""Other ways to keep K and V in 8 and 4 bits than the ones that are built: choices of a model that ships, and the bytes of a head.

    python benchmarks/kv_formats_tried.py        # writes results/kv-formats-tried.md

K and V are rounded as a way would round them, and kept in float32: what a way takes to read is not timed. Text and choices as quantised_kv.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import numpy as np
import torch
import typer
from torch import Tensor

from paged import LLM, SamplingParams
from paged.attention import KVPool
from paged.attention.kv_pool import LayeredPool
from paged.model.loading import LoadedModel, load_model
from paged.model.machine import machine
from paged.study.accuracy import held_out_text, pieces_of

RESULTS = Path(__file__).resolve().parent / "results" / "kv-formats-tried.md"
# What a scale may be, times that of the number of largest magnitude, where the best one is searched.
TRIED = np.linspace(0.6, 1.1, 21).tolist()
MARGINS = (0.1, 0.25, 0.5, 1.0)
# The share of equal choices that 4 bits would have to reach.
GOAL = 0.95
BUILT, ZERO, CENTRED = "as it is built", "zero point", "K less its mean"
app = typer.Typer(add_completion=False)
Round = Callable[[Tensor], Tensor]


def nearest(numbers: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    return (numbers / scales).round().nan_to_num().clamp(least, most) * scales


def largest(numbers: Tensor, bits: int, *, is_searched: bool = False) -> Tensor:
    """With a scale by the number of largest magnitude, as the layouts have it; or with the one of least squared error."""
    most, least, codes = numbers.amax(-1, keepdim=True), numbers.amin(-1, keepdim=True), 2 ** (bits - 1)
    scales = torch.maximum(most, -least) / codes * torch.where(most >= -least, -1, 1)
    if not is_searched:
        return nearest(numbers, scales.bfloat16().float(), -codes, codes - 1)
    found = torch.stack(
        [
            nearest(numbers, (by * scales).bfloat16().float(), -codes, codes - 1)
            for each in TRIED
            for by in (each, -each)
        ]
    )
    best = (found - numbers).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return torch.take_along_dim(found, best, 0)[0]  # fmt: skip


def between(numbers: Tensor, bits: int) -> Tensor:
    """With a scale and a zero point."""
    least, codes = numbers.amin(-1, keepdim=True).bfloat16().float(), 2**bits - 1
    scales = ((numbers.amax(-1, keepdim=True) - least) / codes).bfloat16().float()
    return nearest(numbers - least, scales, 0, codes) + least


def grouped(numbers: Tensor, bits: int, size: int) -> Tensor:
    """With a scale for so many numbers."""
    return largest(numbers.unflatten(-1, (-1, size)), bits).flatten(-2)


def transformed(way: Round, numbers: Tensor) -> Tensor:
    """By the Hadamard transform and back."""
    turned = KVPool(
        num_layers=1, num_blocks=1, block_size=1, num_kv_heads=1, head_dim=numbers.shape[-1], kv_dtype="int8"
    ).layer(0).keys.transformed  # fmt: skip
    return turned(way(turned(numbers)))


@dataclass
class Way:
    """How K and V are rounded, bytes of scales in a head of 64, and whether the mean of K over other text is taken off first, which changes no weight."""

    name: str
    bits: int
    keys: Round
    values: Round
    scale_bytes: int
    is_centred: bool = False


def same(name: str, bits: int, way: Round, scale_bytes: int, **more: bool) -> Way:
    both = partial(transformed, way)
    return Way(name, bits, both, both, scale_bytes, **more)


def ways(bits: int) -> list[Way]:
    plain, searched = partial(largest, bits=bits), partial(largest, bits=bits, is_searched=True)
    zero = partial(between, bits=bits)
    return [
        same(BUILT, bits, plain, 2),
        Way("without the transform", bits, plain, plain, 2),
        same("scale of least squared error", bits, searched, 2),
        same(ZERO, bits, zero, 4),
        same("a scale for 16", bits, partial(grouped, bits=bits, size=16), 8),
        same("a scale for 8", bits, partial(grouped, bits=bits, size=8), 16),
        same(CENTRED, bits, plain, 2, is_centred=True),
        same("K less its mean, least squared error", bits, searched, 2, is_centred=True),
        same("K less its mean, zero point", bits, zero, 4, is_centred=True),
    ]


def others() -> list[Way]:
    plain = partial(transformed, partial(largest, bits=4))
    more = [same("more bits", bits, partial(largest, bits=bits), 2) for bits in (5, 6, 7)]
    return [Way("K alone", 4, plain, lambda numbers: numbers, 2), Way("V alone", 4, lambda numbers: numbers, plain, 2), *more]  # fmt: skip


def choices(model: LoadedModel, pieces: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The most likely token at each position, and by how much its log-probability is above the next one's."""
    llm = LLM(model, num_blocks=512, max_tokens_per_step=512, backend="torch_gather")
    tokens, margins = [], []
    for answer in llm.generate(pieces, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)):
        for alternatives in answer.prompt_logprobs[1:]:
            first, second = sorted(alternatives.items(), key=lambda item: item[1].rank)[:2]
            tokens.append(first[0])
            margins.append(first[1].logprob - second[1].logprob)
    return np.array(tokens), np.array(margins)


def rows_of(name: str) -> tuple[list[str], dict[tuple[int, str], float]]:
    """Rows of the table for a model that ships, and the share of equal choices by bits and way."""
    model, written = load_model(name), LayeredPool.write_kv
    pieces = pieces_of(model, held_out_text())
    seen: dict[int, list[Tensor]] = {}

    def watch(self: LayeredPool, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        seen.setdefault(layer, []).append(keys)
        written(self, layer, slots, keys, values)

    # Half of the text gives the means, and the other half is read.
    half = len(pieces) // 2
    with patch.object(LayeredPool, "write_kv", watch):
        choices(model, pieces[:half])
    means = {layer: torch.cat(each).mean(0) for layer, each in seen.items()}
    pieces = pieces[half:]
    base, margins = choices(model, pieces)
    rows, shares = [], {}
    for way in [*ways(8), *ways(4), *others()]:

        def rounded(self: LayeredPool, layer: int, slots: Tensor, keys: Tensor, values: Tensor, way: Way = way) -> None:
            mean = means[layer] if way.is_centred else 0
            written(self, layer, slots, way.keys(keys - mean) + mean, way.values(values))

        with patch.object(LayeredPool, "write_kv", rounded):
            found, _ = choices(model, pieces)
        differs = found != base
        shares[way.bits, way.name] = float(1 - differs.mean())
        close = [f"{np.mean(margins[differs] < each):.0%}" if differs.any() else "" for each in MARGINS]
        num_bytes = 64 * way.bits / 8 + way.scale_bytes
        rows.append(
            f"| {name} | {way.bits} | {way.name} | {num_bytes:g}, {128 / num_bytes:.2f} × | {shares[way.bits, way.name]:.1%} | {' | '.join(close)} |"
        )
        print(rows[-1], flush=True)
    near = ", ".join(f"{np.mean(margins < each):.0%} below {each:g}" for each in MARGINS)
    return [*rows, f"| {name} | | all {len(base):,} positions: {near} | | | | | | |"], shares


def conclusion(shares: dict[tuple[int, str], float]) -> str:
    """What the shares say, in words. It needs those of all ways."""
    of_4 = {each.name: shares[4, each.name] for each in ways(4)}
    of_8 = [shares[8, each.name] for each in ways(8)]
    best = max(of_4, key=lambda name: of_4[name])
    built = {4: of_4[BUILT], **{bits: shares[bits, "more bits"] for bits in (5, 6, 7)}, 8: shares[8, BUILT]}
    enough = next((bits for bits, share in built.items() if share >= GOAL), None)
    takes = f"takes {enough} bits" if enough else "is not reached with 8 bits"
    gains = {name: 100 * (of_4[name] - of_4[BUILT]) for name in (CENTRED, ZERO)}
    return "\n".join(
        [
            f"**{'No' if of_4[best] < GOAL else 'A'} way of 4 bits has {GOAL:.0%} equal choices**: the best, {best}, has {of_4[best]:.1%}.",
            f"As it is built, 4 bits have {of_4[BUILT]:.1%}, and {GOAL:.0%} {takes}. {CENTRED} (a constant of the model, so weights stay) changes 4 bits by",
            f"{gains[CENTRED]:+.1f} points, a {ZERO} by {gains[ZERO]:+.1f}. Both cost time where K is written, and one a sum where it is read. Neither is built.",
            f"Ways of 8 bits have {min(of_8):.1%} to {max(of_8):.1%}.",
        ]
    )


@app.command()
def main(out: Annotated[Path, typer.Option(dir_okay=False)] = RESULTS, model: str = "embedded") -> None:
    """Try all, and write the page."""
    torch.set_num_threads(1)
    its = machine()
    rows, shares = rows_of(model)
    said = {"lines": "\n".join(rows), "conclusion": conclusion(shares)}
    out.write_text(PAGE.format(machine=f"Python {its['python']}, torch {its['torch']}", **said), encoding="utf-8")


PAGE = """# Ways to keep K and V in 8 and 4 bits

{machine}.

```
python benchmarks/kv_formats_tried.py
```

Positions of held-out text at which the most likely token is that of K and V as they are, the true tokens before it being known. Bytes: of K or V of a
head of 64, and how many times as many tokens fit in the bytes of bfloat16; at least 1.9 and 3.6 × are wanted, so that 3 bytes are left for scales.
Margins: of the positions that differ, the share at which the log-probability of the choice was above the next one's by less than so much.

| model | bits | way | bytes | equal | < 0.1 | < 0.25 | < 0.5 | < 1 |
|---|--:|---|--:|--:|--:|--:|--:|--:|
{lines}

{conclusion}
"""

if __name__ == "__main__":
    app()
