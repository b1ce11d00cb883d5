"""The model of a command: a checkpoint folder, a small one that ships, or random weights in a model's shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from paged.base.extras import import_with_extra
from paged.cli.config_options import declared
from paged.cli.show import loading
from paged.errors import InvalidConfig
from paged.model.checkpoint import EMBEDDED
from paged.model.quantised.names import check_asked
from paged.study.hardware import model_named

if TYPE_CHECKING:
    from paged.model.loading import LoadedModel

MODEL = "The model"
_SHAPE_HELP = "Random weights instead, in the shape of a Llama: a name of `paged capacity` such as smollm-135m, or a JSON file (docs/hardware.md)."

# fmt: off
ModelArgument = Annotated[str | None, Argument(metavar="MODEL", help="A checkpoint folder in the Hugging Face layout, or a small model that ships: embedded or hybrid.", show_default="embedded")]
Shape = Annotated[str | None, Option("--shape", help=_SHAPE_HELP, show_default="none", rich_help_panel=MODEL)]
Backend = Annotated[str, Option(help="Attention backend: reference, native, torch_gather or xformers_splitk; auto takes the fastest.", rich_help_panel=MODEL)]
Dtype = Annotated[str, Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=MODEL)]
KvCacheDtype = Annotated[str, declared("kv_cache_dtype", MODEL)]
Quantization = Annotated[str | None, declared("quantization")]
QuantizeHead = Annotated[bool, declared("quantize_head")]
Fast = Annotated[bool, Option("--fast", help="Pack each step as it comes, instead of tiles of one size.", rich_help_panel=MODEL)]
Threads = Annotated[int | None, Option(min=1, help="Torch's threads; a small model always runs on one.", show_default="torch's own choice")]
# fmt: on


def check_one(model: str | None, shape: str | None, option: str = "--model") -> None:
    """Raises InvalidConfig where two models are named; `option` is what a folder is named by."""
    if model is not None and shape is not None:
        raise InvalidConfig(f"{option} and --shape both say which model; give one")


def model_name(model: str | None, shape: str | None) -> str:
    """Return the model's name for results."""
    return shape or (EMBEDDED if model is None else Path(model).name)


def loaded_model(
    model: str | None,
    shape: str | None,
    *,
    dtype: str,
    quantization: str | None = None,
    quantize_head: bool = False,
    device: str = "cpu",
    threads: int | None = None,
    wanted: str,
) -> LoadedModel:
    """The model, with so many threads of torch from now on; `wanted` is what needs it. Raises what is wrong with it, and MissingExtra."""
    check_asked(quantization, with_head=quantize_head)
    as_codes: Any = {"quantization": quantization, "quantize_head": quantize_head}
    # Said before torch is imported, which takes a while.
    described = None if shape is None else model_named(shape)
    with loading(shape or model):
        torch = import_with_extra("torch", wanted)
        from paged.model.loading import load_model
        from paged.model.random_weights import random_model

        if threads is not None:
            torch.set_num_threads(threads)
        if described is not None:
            return random_model(described, dtype=dtype, device=device, **as_codes)
        return load_model(model or EMBEDDED, dtype=dtype, device=device, **as_codes)
