"""`paged accuracy`: how much quantised weights, K and V change a model's answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from paged.attention.kv_dtypes import AUTO, KV_DTYPES
from paged.base.extras import import_with_extra
from paged.cli.models import ModelArgument, ModelOptions, Threads
from paged.cli.options import Json, chosen
from paged.cli.show import all_of, print_json, table
from paged.errors import InvalidConfig
from paged.model.checkpoint.text import SEQUENCE
from paged.study.accuracy import Accuracy, compared, held_out_text, pieces_of, read

AS_IS = "as-is"
_WANTED = "reading text"
_KV_DTYPES = ",".join(KV_DTYPES)
_WEIGHTS = (AS_IS, "int8", "int4")


def accuracy(
    model: ModelArgument = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="UTF-8 text to read.", show_default="what was held out of the training of the models that ship")] = None,
    weights: Annotated[str, typer.Option("--weights", metavar="as-is|int8|int4[,…]", help="Storage of weights, one or several with commas.", show_default="all; of a checkpoint in codes as-is")] = "",
    kv_cache_dtype: Annotated[str, typer.Option("--kv-cache-dtype", metavar="auto|int8|int4[,…]", help="Storage of K and V, one or several with commas.")] = _KV_DTYPES,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a piece of text.")] = SEQUENCE,
    threads: Threads = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Measure how much quantised weights, K and V change a model's answers.

    The model reads text, and predicts each token from the true ones before it. Loss: the mean of −log of the true token's probability. Choices:
    positions with another most likely token. Log-probabilities: absolute differences of the true tokens'.

    Example: `paged accuracy embedded --weights as-is,int4 --kv-cache-dtype auto,int8`
    """
    words = held_out_text() if text is None else text_of(text)
    ways = chosen(weights, "--weights", _WEIGHTS) if weights else _ways_of(model)
    kv_dtypes = chosen(kv_cache_dtype, "--kv-cache-dtype", KV_DTYPES)
    named = ModelOptions(model, threads=threads)

    def show(found: list[Accuracy]) -> None:
        if json:
            print_json({"model": named.name, "length": length, "ways": msgspec.to_builtins(found)})
            return
        columns = ["weights", "K and V", "loss", "change", "other choices", "where sure", "log-prob error", "p99"]
        title = f"{named.name}: {found[0].positions:,} positions; sure of {found[0].sure:.0%}"
        table(title, columns, [_cells(each) for each in found], right=range(2, len(columns)))

    measured = _measured(named, words, ways, kv_dtypes, length)
    show(all_of(measured, len(ways) * len(kv_dtypes), "way of storing", show))


def text_of(file: Path) -> list[str]:
    """Return the text of a file. Raises InvalidConfig if it is not UTF-8."""
    try:
        return [file.read_text(encoding="utf-8")]
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{file} is not UTF-8: {error.reason} at byte {error.start:,}") from None


def loss_of(model: str | Path, text: list[str]) -> float:
    """Return a model's loss on text, in pieces of as many tokens as the models that ship were trained on."""
    loaded = ModelOptions(str(model)).loaded(_WANTED)
    return read(loaded, pieces_of(loaded, text), AUTO).loss


def _measured(
    named: ModelOptions, text: list[str], ways: list[str], kv_dtypes: list[str], length: int
) -> Iterator[Accuracy]:
    """Yield the accuracy of each combination, weight by weight. It compares with both as they are, which it always reads."""
    base = None
    for weights in dict.fromkeys((AS_IS, *ways)):
        loaded = replace(named, quantization=None if weights == AS_IS else weights).loaded(_WANTED)
        pieces = pieces_of(loaded, text, length)
        if base is None:
            base = read(loaded, pieces, AUTO)
        if weights not in ways:
            continue
        for kv_dtype in kv_dtypes:
            is_base = weights == AS_IS and kv_dtype == AUTO
            found = base if is_base else read(loaded, pieces, kv_dtype)
            yield compared(base, found, weights=weights, kv_dtype=kv_dtype)


def _ways_of(model: str | None) -> list[str]:
    """Return all ways to store weights for a checkpoint of floats; as-is for one in codes."""
    import_with_extra("torch", _WANTED)
    from paged.model.checkpoint import named_or_shipped
    from paged.model.loading import config_of
    from paged.model.quantised.checkpoints import settings_of

    config = config_of(Path(named_or_shipped(model)))
    return list(_WEIGHTS) if settings_of(config) is None else [AS_IS]


def _cells(found: Accuracy) -> list[str]:
    return [
        found.weights,
        found.kv_dtype,
        f"{found.loss:.4f}",
        f"{found.change:+.2%}",
        f"{found.differing:.2%}",
        f"{found.differing_where_sure:.2%}",
        f"{found.mean_error:.4f}",
        f"{found.p99_error:.4f}",
    ]
