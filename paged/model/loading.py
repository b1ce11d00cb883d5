"""Loading a checkpoint folder as a model that runs on paged memory."""

from __future__ import annotations

import ctypes
import json
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paged.attention import Expand, LayerOptions
from paged.base.words import short_cause
from paged.errors import BrokenCheckpoint, ModelError, UnknownLayers, UnsupportedModel
from paged.model.attention_layers import AttentionLayer, are_alike
from paged.model.checkpoint import check_folder, named_or_shipped
from paged.model.hook import ATTENTION, follow_latents, follow_layers, register, under_way
from paged.model.kept_layers import KEPT_BY
from paged.model.native.experts import pack_experts
from paged.model.native.packed import pack_linears
from paged.model.one_sequence import attend_by_itself, follow_indexers, follow_tails
from paged.model.quantised.at_load import AtLoad, check_layers, check_quantization
from paged.model.quantised.checkpoints import reader_of
from paged.model.quantised.files import TensorFiles
from paged.model.quantised.placing import CodesSource, Placed
from paged.model.rotary import follow_positions, follow_rows
from paged.model.states.layer import FirstToken, KeepsState, RowStates, follow_states
from paged.model.states.plan import check_plan
from paged.model.states.within import Compressor, states_within
from paged.model.tokenizer import load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder, and what the rest of the engine needs to know of it.

    module           the transformers model, in evaluation mode, with its attention in `paged.model.hook`
    tokenizer        None if the folder has none
    layers           the attention layers, as a trial run found them
    has_soft_cap     whether any layer caps its scores
    has_sinks        whether any layer has attention sinks
    vocabulary_size  token ids are below it
    max_length       most tokens of a sequence; None if the configuration does not say
    eos_token_ids    ids that end a sequence
    rotary_limit     longest sequence that has the short frequencies of LongRoPE; None: the model has no LongRoPE
    state_layers     the layers that keep a state, followed by the states within modules that take one sequence at a time
    quantization     "int8" or "int4" if weights of linear layers are codes, stored or made at load; None: all are floats
    quantize_head    whether the output projection was quantised at load, too
    tiles            by backend and number of threads, what `runner_for` found: tokens of a tile, and whether threads may adapt
    """

    path: Path
    module: Any
    tokenizer: Any
    layers: tuple[AttentionLayer, ...]
    has_soft_cap: bool
    has_sinks: bool
    vocabulary_size: int
    max_length: int | None
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    rotary_limit: int | None = None
    state_layers: tuple[KeepsState, ...] = ()
    quantization: str | None = None
    quantize_head: bool = False
    tiles: dict[tuple[str, int], tuple[int, bool]] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def precision(self) -> str:
        """The dtype, and how weights are quantised: "float32, weights in int8"."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.quantization is None else f"{dtype}, weights in {self.quantization}"

    @property
    def num_layers(self) -> int:
        """Number of attention layers."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads of the first attention layer; 0 if no layer attends. The next three describe what that layer keeps: K and V, or latents."""
        return self.layers[0].num_heads if self.layers else 0

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].heads if self.layers else 0

    @property
    def head_dim(self) -> int:
        return self.layers[0].key_size if self.layers else 0

    @property
    def value_dim(self) -> int:
        return self.layers[0].value_size if self.layers else 0

    @property
    def is_uniform(self) -> bool:
        """Whether each layer keeps K and V of its own, and all have one shape."""
        return not self.state_layers and are_alike(self.layers)

    @property
    def is_plain(self) -> bool:
        """Whether the model is uniform, and all layers keep all tokens: then there is one group of layers, and blocks of all layers waste nothing."""
        return self.is_uniform and all(each.kind == "full" for each in self.layers)


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    quantization: str | None = None,
    quantize_head: bool = False,
) -> LoadedModel:
    """Load a checkpoint folder: config.json, safetensors, and a tokenizer if there is one. Nothing is downloaded.

    path           the folder, or the name of a model that ships
    dtype          "float32", "bfloat16" or "float16"; "auto" is float32 on a CPU and the checkpoint's own dtype elsewhere
    quantization   on a CPU, linear layers as codes of 8 or 4 bits, "int8" or "int4"; a checkpoint stored in codes allows its own alone
    quantize_head  quantise the output projection, too, as int8

    Raises CheckpointNotFound, BrokenCheckpoint, UnsupportedModel, and InvalidConfig for a quantization that is not known or not that of
    the checkpoint, and for weights to quantise that are not finite.
    """
    folder = Path(named_or_shipped(path))
    check_dtype(dtype)
    where = usable_device(device)
    check_quantization(quantization, where, with_head=quantize_head)
    config = config_of(folder)
    codes: CodesSource | None = None
    if (checkpoint := reader_of(config, folder)) is not None:
        codes = Placed(checkpoint, quantization, where, with_head=quantize_head)
    # It imports this module.
    from paged.model.load_check import check_answers

    register()
    with silenced():
        check_answers(config, folder)
        if quantization is not None and codes is None:
            check_layers(_described(config), quantization, folder)
            codes = AtLoad(quantization, with_head=quantize_head, files=TensorFiles(folder))
        wanted: Any = DTYPES.get(dtype, torch.float32 if where.type == "cpu" else "auto")
        module = _module(folder, config, wanted, {} if codes is None else codes.options(config)).eval()
        if codes is None:
            module.to(where)
        return as_loaded(module, folder, load_tokenizer(folder), where, codes)


@contextmanager
def silenced() -> Iterator[None]:
    """Silence transformers' progress bars, and its warnings, as of missing kernels for other devices."""
    from transformers.utils import logging

    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def as_loaded(
    module: Any,
    name: Path,
    tokenizer: Any,
    where: torch.device,
    codes: CodesSource | None = None,
) -> LoadedModel:
    """Make a LoadedModel of a transformers decoder on the device `where`, in evaluation mode, built with our attention.

    Changes the module in place: linear layers of `codes` become codes, and on a CPU other linear layers and experts are packed. Raises
    UnsupportedModel, and what `codes.replace` raises.
    """
    dtype = next(module.parameters()).dtype
    follow_layers(module)
    # First, since RWKV's layers change weights, which cannot be done once they are packed.
    state_layers: tuple[KeepsState, ...] = follow_states(module)
    state_layers += states_within(module, len(state_layers))
    if codes is not None:
        codes.replace(module)
    if where.type == "cpu":
        pack_linears(module)
        pack_experts(module)
    _let_go_of_files(module, name)
    rotary_limit = follow_rows(module)
    follow_latents(module)
    follow_indexers(module)
    follow_tails(module)
    follow_positions(module)
    trial = _first_trial(module, state_layers, name, where)
    text = module.config.get_text_config()
    return LoadedModel(
        path=name,
        module=module,
        tokenizer=tokenizer,
        layers=trial.layers,
        has_soft_cap=trial.has_soft_cap,
        has_sinks=trial.has_sinks,
        vocabulary_size=int(text.vocab_size),
        max_length=getattr(text, "max_position_embeddings", None),
        eos_token_ids=_eos(module, text, name),
        dtype=dtype,
        device=where,
        rotary_limit=rotary_limit,
        state_layers=state_layers,
        quantization=None if codes is None else codes.quantization,
        quantize_head=codes is not None and codes.with_head,
    )


def _let_go_of_files(module: nn.Module, folder: Path) -> None:
    """Copy each parameter that lies in a mapped file, and return freed memory to the system: as long as one parameter lies there, the whole file
    counts as memory of this process."""
    with suppress(OSError, ValueError):
        # Files of a download cache are links to files of other names.
        files = {str(file.resolve()) for file in folder.glob("*.safetensors")}
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        ranges = [line.split()[0].split("-") for line in lines if line.split(maxsplit=5)[-1] in files]
        mapped = [range(int(first, 16), int(last, 16)) for first, last in ranges]
        for each in (*module.parameters(), *module.buffers()):
            if any(each.data_ptr() in its for its in mapped):
                each.data = each.data.clone()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def check_dtype(dtype: str) -> None:
    """Raise UnsupportedModel for a dtype that is not known."""
    if dtype != "auto" and dtype not in DTYPES:
        raise UnsupportedModel(f"unknown dtype {dtype!r}; known ones are auto, {', '.join(DTYPES)}.")


def usable_device(name: str | torch.device) -> torch.device:
    """Return the device of that name. Raises UnsupportedModel if it cannot be used."""
    try:
        where = torch.device(name)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedModel(f"device {str(name)!r} cannot be used here: {short_cause(error)}") from error
    return where


def config_of(folder: Path) -> Any:
    """Return the configuration of a checkpoint folder. Raises CheckpointNotFound, BrokenCheckpoint, and UnsupportedModel for an architecture that
    cannot run here."""
    config = _config(folder)
    _check_architecture(config, folder)
    return config


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    check_folder(folder)
    # transformers ignores one that cannot be read.
    generation = folder / "generation_config.json"
    try:
        if generation.exists():
            json.loads(generation.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{folder}: generation_config.json cannot be read: {short_cause(error)}") from error
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise BrokenCheckpoint(f"{folder}: config.json cannot be read: {short_cause(error)}") from error


def _check_architecture(config: Any, folder: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{folder}: {config.model_type} is no decoder that writes text.")
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    if unknown := sorted({each for each in types if each not in KEPT_BY and each not in ("mlp", "moe")}):
        raise UnsupportedModel(
            f"{folder}: what layers of {' and '.join(unknown)} keep of a sequence is not known here."
        )


def attention_of(config: Any) -> str:
    """Return the attention that a model of this configuration is built with: ours, or "eager" if its architecture ignores transformers' interface."""
    # Some classes, such as most models with states, use the interface without saying so; a trial run finds out.
    architecture, uses_it = _architecture(config)
    says_so = getattr(architecture, "_supports_attention_backend", False)
    return ATTENTION if uses_it or says_so or getattr(architecture, "_is_stateful", False) else "eager"


def reference_attention(config: Any) -> str:
    """Return transformers' attention to compare ours with: "eager", or "sdpa" where a module has both without the interface. Falcon is such, and its
    eager attention adds biases by distance twice."""
    architecture, uses_it = _architecture(config)
    return "sdpa" if getattr(architecture, "_supports_sdpa", False) and not uses_it else "eager"


def _architecture(config: Any) -> tuple[Any, bool]:
    """Return the class of a configuration's decoder, and whether its module uses transformers' interface for attention."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    # The lookup imports the module.
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return architecture, hasattr(sys.modules[architecture.__module__], "ALL_ATTENTION_FUNCTIONS")


def _described(config: Any) -> Any:
    """Return the module of a configuration on the meta device, without memory for weights."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return build(config)


def _module(folder: Path, config: Any, dtype: Any, options: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        module, info = load(
            folder,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation=attention_of(config),
            dtype=dtype,
            output_loading_info=True,
            # They are refused below, by name.
            ignore_mismatched_sizes=True,
            **options,
        )
    except ModelError:
        raise
    except Exception as error:
        raise BrokenCheckpoint(f"{folder}: the weights cannot be read: {short_cause(error)}") from error
    wrong = sorted(info["missing_keys"]) + sorted(str(each[0]) for each in info["mismatched_keys"])
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise BrokenCheckpoint(f"{folder}: weights that are missing or of another shape: {', '.join(wrong[:3])}{more}.")
    return module


def _eos(module: Any, config: Any, folder: Path) -> tuple[int, ...]:
    generation = getattr(module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = config.eos_token_id
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    if not all(type(each) is int for each in ids):
        raise BrokenCheckpoint(
            f"{folder}: eos_token_id of its generation configuration is {found!r}; it has to be a token id, or a list of them."
        )
    return tuple(each for each in ids if 0 <= each < config.vocab_size)


class Unwanted(Exception):
    """A layer wants what no backend does; the message is what. `can_itself`: its module can."""

    def __init__(self, what: str, *, can_itself: bool = False) -> None:
        super().__init__(what)
        self.can_itself = can_itself


@contextmanager
def refusing(module: nn.Module, name: Path) -> Iterator[None]:
    """Turn what the model inside raises into UnsupportedModel, with the layer's name and the cause; MemoryError stays."""
    try:
        yield
    except (MemoryError, UnsupportedModel):
        raise
    except Exception as error:
        owners = {id(each): path for path, each in module.named_modules()}
        frames = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)]
        layer = next((owners[each] for each in reversed(frames) if owners.get(each)), type(module).__name__)
        if isinstance(error, Unwanted):
            raise UnsupportedModel(f"{name}: {layer} wants {error}, which no backend here does.") from error
        raise UnsupportedModel(
            f"{name}: {layer} fails with attention on paged memory ({type(error).__name__}: {short_cause(error)})."
        ) from error


class _Trial:
    """The forward pass of one token, as ForwardPass, which records each layer's attention."""

    def __init__(self, positions: Tensor, state_layers: tuple[KeepsState, ...]) -> None:
        self.has_soft_cap = False
        self.has_sinks = False
        self.is_long: Tensor | None = None
        self.states: RowStates | None = None if not state_layers else FirstToken(state_layers, positions.device)
        self.positions = positions
        self._layers: dict[int, AttentionLayer] = {}
        # By address, the first layer with these keys. The keys stay here, so that no others get their address.
        self._keys: dict[int, tuple[int, Tensor]] = {}
        self._index_sizes: dict[int, int] = {}
        self._compressed: dict[int, dict[str, int]] = {}
        self._strides = {each.layer: each.stride for each in state_layers if isinstance(each, Compressor)}

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        options: LayerOptions,
        expand: Expand | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        if layer in self._layers:
            raise Unwanted("to attend twice in a pass", can_itself=True)
        self.has_soft_cap |= options.soft_cap is not None
        self.has_sinks |= options.sinks is not None
        source, _ = self._keys.setdefault(keys.data_ptr(), (layer, keys))
        heads, num_heads = keys.shape[1], queries.shape[1]
        if expand is not None:
            latents = [part.transpose(0, 1)[None] for part in (keys, values)]
            expanded, values_of_all = (part[0].transpose(0, 1) for part in expand(latents[0], latents[1]))
            attended = (expanded.shape[1], expanded.shape[2], values_of_all.shape[2])
        else:
            values_of_all, attended = values, (heads, keys.shape[2], values.shape[2])
        self._layers[layer] = AttentionLayer(
            layer=layer,
            kind="window" if options.window else "chunk" if options.chunk else "full",
            reach=options.window or options.chunk or 0,
            num_heads=num_heads,
            heads=heads,
            key_size=keys.shape[2],
            value_size=values.shape[2],
            attended=attended,
            source=None if source == layer else source,
            choosers=0 if chosen is None else len(chosen),
        )
        return values_of_all.repeat_interleave(num_heads // attended[0], 1)

    def shares(self) -> list[tuple[int, int]]:
        return [(0, 1)]

    def of_share(self, first: int, stop: int) -> _Trial:
        return self

    def index(self, layer: int, first: int, keys: Tensor) -> Tensor:
        self._index_sizes[layer] = keys.shape[1]
        return keys

    def keep(self, layer: int, first: int, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        if layer in self._layers:
            raise Unwanted("to keep K and V twice in a pass")
        heads, size, value_size = keys.shape[1], keys.shape[2], values.shape[2]
        self._layers[layer] = AttentionLayer(
            layer=layer,
            kind="window" if window else "full",
            reach=window or 0,
            num_heads=heads,
            heads=heads,
            key_size=size,
            value_size=value_size,
            attended=(heads, size, value_size),
            by_itself=True,
            is_one=(keys.data_ptr(), keys.shape, keys.stride()) == (values.data_ptr(), values.shape, values.stride()),
        )
        return keys, values

    def keep_compressed(self, layer: int, first: int, name: str, begin: int, new: Tensor) -> Tensor:
        self._compressed.setdefault(layer, {})[name] = new.shape[1]
        return new

    def refuse(self, what: str, *, can_itself: bool = False) -> None:
        raise Unwanted(what, can_itself=can_itself)

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The attention layers, in the order of the model."""
        return tuple(
            self._layers[layer]._replace(
                compressed=tuple(self._compressed.get(layer, {}).items()),
                stride=self._strides.get(layer, 1),
                index_size=self._index_sizes.get(layer, 0),
            )
            for layer in sorted(self._layers)
        )


def _first_trial(module: Any, state_layers: tuple[KeepsState, ...], folder: Path, device: torch.device) -> _Trial:
    """Run `_trial`. Attention modules that ignore transformers' interface, want what no backend does, or compress, attend by themselves from then on."""
    if attention_of(module.config) != ATTENTION or any(isinstance(each, Compressor) for each in state_layers):
        attend_by_itself(module)
        return _trial(module, state_layers, folder, device)
    try:
        return _trial(module, state_layers, folder, device)
    except UnsupportedModel as error:
        if not getattr(error.__cause__, "can_itself", False):
            raise
        attend_by_itself(module)
        with suppress(UnsupportedModel):
            return _trial(module, state_layers, folder, device)
        raise


def _trial(module: Any, state_layers: tuple[KeepsState, ...], folder: Path, device: torch.device) -> _Trial:
    """Run one token through the model. Raises UnsupportedModel unless every layer attends or keeps a state, and states are as the configuration says."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    trial = _Trial(token[0], state_layers)
    with torch.inference_mode(), under_way(trial), warnings.catch_warnings(action="ignore"), refusing(module, folder):
        module(input_ids=token, position_ids=token, use_cache=False)
    _check_all_came_by(trial, state_layers, module.config.get_text_config(), folder)
    if state_layers:
        # For kinds that `kept_layers` does not know, the trial is the only source.
        with suppress(UnknownLayers):
            check_plan(state_layers, module.config, folder)
    return trial


def _check_all_came_by(trial: _Trial, state_layers: tuple[KeepsState, ...], config: Any, folder: Path) -> None:
    """Raise UnsupportedModel unless each layer of the configuration attends, keeps a state, or mixes no tokens."""
    kinds = getattr(config, "layer_types", None) or ()
    idle = {layer for layer, kind in enumerate(kinds) if kind in ("mlp", "moe")}
    found = {each.layer for each in trial.layers} | {each.layer for each in state_layers}
    expected = range(int(config.num_hidden_layers))
    lost = [str(layer) for layer in expected if layer not in found | idle]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise UnsupportedModel(
            f"{folder}: layers {', '.join(lost[:3])}{more} neither attend through transformers' interface nor use its cache; each "
            "has to, unless it mixes no tokens."
        )
    if not found <= set(expected):
        raise UnsupportedModel(
            f"{folder}: layer {max(found)} attends or keeps a state, and its configuration has {len(expected)} layers."
        )
