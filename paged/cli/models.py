"""The model of a command: a checkpoint folder, a small one that ships, or random weights in a model's shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Argument, Option

from paged.attention.kv_dtypes import AUTO
from paged.base.extras import import_with_extra
from paged.cli.commands import declared
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
Backend = Annotated[str, Option(help="Attention backend: reference, native, torch_gather, triton or xformers_splitk; auto takes the fastest.", rich_help_panel=MODEL)]
Dtype = Annotated[str, Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=MODEL)]
KvCacheDtype = Annotated[str, declared("kv_cache_dtype", MODEL)]
Quantization = Annotated[str | None, declared("quantization")]
QuantizeHead = Annotated[bool, declared("quantize_head")]
Fast = Annotated[bool, Option("--fast", help="Pack each step as it comes, instead of tiles of one size.", rich_help_panel=MODEL)]
Threads = Annotated[int | None, Option(min=1, help="Torch's threads; a small model always runs on one.", show_default="torch's own choice")]
# fmt: on


class ModelOptions(msgspec.Struct, frozen=True):
    """A model, and how it is loaded and run, as the options of a bench describe it. Raises InvalidConfig for two models, and for an unknown
    quantization."""

    model: ModelArgument = None
    shape: Shape = None
    dtype: Dtype = "auto"
    quantization: Quantization = None
    quantize_head: QuantizeHead = False
    kv_cache_dtype: KvCacheDtype = AUTO
    backend: Backend = "auto"
    fast: Fast = False
    threads: Threads = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.model is not None and self.shape is not None:
            raise InvalidConfig("a model and --shape both say which model; give one")
        check_asked(self.quantization, with_head=self.quantize_head)

    @property
    def name(self) -> str:
        """The model's name in results."""
        return self.shape or (EMBEDDED if self.model is None else Path(self.model).name)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of an engine that runs it."""
        return {"backend": self.backend, "batch_invariant": not self.fast, "kv_cache_dtype": self.kv_cache_dtype}

    def loaded(self, wanted: str) -> LoadedModel:
        """Load the model, and set torch's threads from now on. `wanted`: what needs it. Raises the model's errors, and MissingExtra."""
        how: Any = {name: getattr(self, name) for name in ("dtype", "device", "quantization", "quantize_head")}
        # Refuse a wrong shape before torch is imported, which takes a while.
        described = None if self.shape is None else model_named(self.shape)
        with loading(self.shape or self.model):
            torch = import_with_extra("torch", wanted)
            from paged.model.loading import load_model
            from paged.model.random_weights import random_model

            if self.threads is not None:
                torch.set_num_threads(self.threads)
            return load_model(self.model or EMBEDDED, **how) if described is None else random_model(described, **how)
