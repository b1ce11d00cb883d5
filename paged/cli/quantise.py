"""`paged quantise`: a checkpoint of floats written again with its linear layers in 8 or 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from paged.base.budget import as_bytes
from paged.base.extras import import_with_extra
from paged.base.words import counted
from paged.cli.accuracy import loss_of, text_of
from paged.cli.models import ModelArgument
from paged.cli.options import Json
from paged.cli.show import counting, figures, loading, print_json, table
from paged.model.checkpoint import EMBEDDED

if TYPE_CHECKING:
    from paged.model.quantised.writing import Written

_SHOWN = 5


def quantise(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="The folder to make.")],
    model: ModelArgument = None,
    weights: Annotated[str, typer.Option("--weights", "-w", help="int8 or int4.")] = "int8",
    group_size: Annotated[int | None, typer.Option(help="Inputs that share a scale: 32, 64 or 128.", show_default="int8: a scale a result; int4: 32")] = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="UTF-8 text to read.", show_default="none")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Write a checkpoint again with the linear layers of its decoder layers in 8 or 4 bits, in the format of compressed-tensors, which other engines read, too.

    Embeddings, head, norms and states stay as they are. It reads one layer at a time. With --text it shows the loss before and after.

    Example: `paged quantise embedded --weights int4 --out embedded-int4`
    """
    words = None if text is None else text_of(text)
    with loading(model):
        import_with_extra("torch", "quantising")
        from paged.model.quantised.writing import check_target, write_quantised
    check_target(out, weights, group_size)
    # Before a folder is written: the text may be too short.
    before = None if words is None else loss_of(model or EMBEDDED, words)
    with counting("layers", None) as advance:
        made = write_quantised(
            *(model or EMBEDDED, out),
            weights=weights,
            group_size=group_size,
            on_layer=lambda _, count: advance(total=count),
        )
    losses = None if words is None or before is None else (before, loss_of(out, words))
    if json:
        shown: dict[str, Any] = msgspec.to_builtins(made, enc_hook=str)
        print_json({**shown, "loss_before": losses and losses[0], "loss_after": losses and losses[1]})
        return
    _show(made, losses)


def _show(made: Written, losses: tuple[float, float] | None) -> None:
    worst = sorted(made.layers, key=lambda each: -each.error)[:_SHOWN]
    rows = [(each.name, as_bytes(each.bytes_before), as_bytes(each.bytes_after), f"{each.error:.2%}") for each in worst]
    title = f"the {len(worst)} of {counted(len(made.layers), 'layer')} that are furthest off"
    table(title, ("layer", "before", "after", "error"), rows, right=(1, 2, 3))
    share = made.bytes_after / made.bytes_before
    others = made.bytes_not_linear / made.bytes_after
    off = sorted(each.error for each in made.layers)[len(made.layers) // 2]
    said = [
        ("all tensors", f"{as_bytes(made.bytes_before)}, now {as_bytes(made.bytes_after)}: {share:.0%}"),
        ("error of a layer", f"{off:.2%} of its weights' norm at the median, {worst[0].error:.2%} at most"),
        (
            "floats in layers",
            f"{as_bytes(made.bytes_not_linear)} of no linear layer (norms, experts): {others:.0%} of what is written",
        ),
    ]
    if losses is not None:
        said.append(("loss on the text", f"{losses[0]:.4f}, now {losses[1]:.4f}: {losses[1] / losses[0] - 1:+.2%}"))
    figures("what was written", [*said, ("written to", str(made.folder))])
