"""The tokens and states that the layers of a transformers configuration keep of a sequence.

transformers' classes read a configuration, add its defaults, and name each layer's kind of cache. This module adds the bytes of a token and of a
state by kind of model (`model_type`). For each kind known here, a test compares these with the cache of transformers' model; any other kind is
refused by name. Layers that attend to K and V of an earlier layer keep nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from paged.base.extras import import_with_extra
from paged.errors import InvalidConfig, MissingExtra, UnknownLayers
from paged.model.layer_plan import Layers, Part

MOST = 1 << 24
"""Largest size or count that a configuration may have."""
_SIZE = 2
"""Bytes of an element of K and V, and of a convolution's tail: bf16."""
_STATE_SIZES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2}
_NEEDED_BY = "model.kept_layers"
KEPT_BY = {
    "full_attention": ("full",),
    "compressed_sparse_attention": ("window", "compressed", "state"),
    "heavily_compressed_attention": ("window", "compressed", "state"),
    "indexed_attention": ("full",),
    "minimax_m3_sparse": ("full",),
    "sliding_attention": ("window",),
    "chunked_attention": ("chunk",),
    "linear_attention": ("state",),
    "conv": ("state",),
    "hybrid": ("full", "state"),
    "hybrid_sliding": ("window", "state"),
    "dummy": (),
}
"""What a layer keeps, by transformers' name of its kind."""
_CHOOSING = ("indexed_attention", "minimax_m3_sparse")
"""Kinds that keep an index key of each token: later tokens choose by it what they attend to."""
CONV_PIECES = 4
"""A convolution's tail lies in four pieces, each of a quarter of its channels."""


class Sizes(NamedTuple):
    """Bytes of an element of K, V and the tail of a convolution; of a recurrent state, None: as the configuration says; and of a token id."""

    element: int = _SIZE
    state: int | None = None
    token_id: int = 8


class Compressed(NamedTuple):
    """Entries that a layer keeps beside a window: one of each of these `sizes`, in elements, for every `stride` tokens. With `overlaps` an entry also uses
    the tokens of the one before."""

    stride: int
    sizes: tuple[int, ...]
    overlaps: bool

    def parts(self, element: int, wide: int) -> tuple[Part, ...]:
        """Return the state beside the entries, for every size: two projections of each token without an entry, and, with overlap, two of each token of
        the last entry. `element`, `wide`: bytes of an element; the last projection of overlap has `wide`, since a bias is added to it."""
        found = [
            Part(units=2 * (self.stride - 1), unit_bytes=each * (1 + self.overlaps) * element) for each in self.sizes
        ]
        for each in self.sizes if self.overlaps else ():
            found += [Part(units=self.stride, unit_bytes=each * size) for size in (element, wide)]
        return tuple(found)


class _Kind(NamedTuple):
    """How to read the configurations of a kind of model. Each function takes the configuration of one layer first.

    entry        bytes of each piece that the layer keeps of a token, given what it keeps ("full", "window", ...)
    parts        parts of the layer's state, given the bytes of an element of its recurrence, and of any other element
    state_size   bytes of an element of a recurrent state if the configuration does not say
    layer_type   kind of all layers, if transformers has no cache for the kind of model
    compressed   entries of several tokens, given the layer's type
    numbered     more parts of the layer's state, given its number from 0
    """

    entry: Callable[[Any, str], tuple[int, ...]]
    parts: Callable[[Any, int, int], tuple[Part, ...]] | None = None
    state_size: int = 2
    layer_type: str | None = None
    compressed: Callable[[Any, str], Compressed] | None = None
    numbered: Callable[[Any, int, Sizes], tuple[Part, ...]] | None = None


def config_of(document: dict[str, Any]) -> Any:
    """Return transformers' configuration for the contents of a config.json.

    Raises UnknownLayers for a kind of model that transformers does not have, InvalidConfig for what its class refuses, MissingExtra without
    transformers.
    """
    mapping = import_with_extra("transformers.models.auto.configuration_auto", _NEEDED_BY).CONFIG_MAPPING
    model_type = document.get("model_type")
    if not isinstance(model_type, str) or model_type not in mapping:
        raise UnknownLayers(str(model_type), list(_KINDS))
    # Checked first: a class makes a list of as many layers.
    for fields in (document, *(each for each in document.values() if isinstance(each, dict))):
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if isinstance(number := fields.get(name), int) and number > MOST:
                raise InvalidConfig(f"{name} is {number}; no model has more than {MOST:,}")
    try:
        return mapping[model_type].from_dict(document)
    except Exception as error:  # Of a file's wrong field a class may raise anything.
        raise InvalidConfig(_said(error)) from None


def kept_layers(config: Any, sizes: Sizes | None = None) -> list[Layers]:
    """Return what a model's layers keep, equal layers together; `config` is transformers' configuration.

    `sizes` None: K and V, and tails of convolutions, are bf16; a recurrent state has the dtype of the configuration, or that of the kind of model.
    Raises UnknownLayers for a kind of model that is not known, InvalidConfig for a field that is wrong or contradicts another, MissingExtra for
    a transformers that is too old.
    """
    config = config.get_text_config()
    model_type = getattr(config, "model_type", None)
    if model_type not in _KINDS:
        raise UnknownLayers(str(model_type), list(_KINDS))
    if not hasattr(config, "per_layer_config"):
        raise MissingExtra("what layers keep is read with transformers 5.20 or later; an older one is installed")
    try:
        counts = Counter(_of_layers(_KINDS[model_type], config, sizes or Sizes()))
    except (InvalidConfig, MissingExtra):
        raise
    except Exception as error:  # The class computes its properties from unchecked fields.
        raise InvalidConfig(_said(error)) from None
    if not counts:
        raise InvalidConfig("no layer keeps anything of a sequence")
    fields = ("kind", "entry", "reach", "parts", "stride")
    return [Layers(count=count, **dict(zip(fields, key, strict=True))) for key, count in counts.items()]


def strides_of(config: Any) -> list[int]:
    """Return the tokens of an entry, for each kind of layers of a model that keeps entries of several tokens; [1] for any other model."""
    config = config.get_text_config()
    kind = _KINDS.get(getattr(config, "model_type", ""))
    return [1] if kind is None or kind.compressed is None else [each.stride for each in kept_layers(config)]


def _of_layers(kind: _Kind, config: Any, sizes: Sizes) -> list[tuple[Any, ...]]:
    """Return (kind, entry, reach, parts, stride) of everything that each layer keeps."""
    cache = import_with_extra("transformers.cache_utils", _NEEDED_BY)
    types, options = cache.get_layer_types_and_kwargs(config)
    found: list[tuple[Any, ...]] = []
    if kind.layer_type is not None:
        types = [kind.layer_type] * len(types)
    size = _state_size(kind, config) if sizes.state is None else sizes.state
    # "shared" layers attend to what the layer before them chose, and keep no index key.
    indexers = getattr(config, "indexer_types", None) or ["full"] * len(types)
    layers = zip(types, options, config.per_layer_config, indexers, strict=True)
    for number, (layer_type, more, of_layer, indexer) in enumerate(layers):
        if layer_type not in KEPT_BY:
            raise InvalidConfig(
                f"layer_types: what {layer_type} keeps is not known; known are {', '.join(sorted(KEPT_BY))}"
            )
        compressed = None
        if "compressed" in KEPT_BY[layer_type]:
            if kind.compressed is None:
                raise InvalidConfig(f"layer_types: {config.model_type} is known without layers of {layer_type}")
            compressed = kind.compressed(of_layer, layer_type)
        for name in KEPT_BY[layer_type]:
            if compressed and name == "compressed":
                entry = tuple(each * sizes.element for each in compressed.sizes)
                found.append(("full", entry, 0, (), compressed.stride))
            elif compressed and name == "state":
                parts = compressed.parts(sizes.element, sizes.state or _STATE_SIZES["float32"])
                found.append((name, (), 0, parts, 1))
            elif name == "state":
                if kind.parts is None:
                    raise InvalidConfig(f"layer_types: {config.model_type} is known without layers that keep a state")
                numbered = kind.numbered(of_layer, number, sizes) if kind.numbered else ()
                found.append((name, (), 0, kind.parts(of_layer, size, sizes.element) + numbered, 1))
            else:
                entry = kind.entry(of_layer, name)
                if layer_type in _CHOOSING and indexer != "shared":
                    entry += _index_key(of_layer)
                entry = tuple(piece // _SIZE * sizes.element for piece in entry)
                reach = _count(of_layer, "sliding_window") if compressed else more.get("sliding_window", 0)
                found.append((name, entry, reach, (), 1))
    return found


def _count(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise InvalidConfig(f"{name} is {value!r}; it has to be a whole number from 1 to {MOST:,}")
    return value


def _said(error: Exception) -> str:
    return f"transformers cannot read it: {type(error).__name__}: {' '.join(str(error).split())}"


# Functions for _Kind.entry.


def _kv(config: Any, name: str) -> tuple[int, ...]:
    heads = _count(config, "num_attention_heads")
    given = getattr(config, "num_key_value_heads", None) is not None
    return _of_heads(config, _count(config, "num_key_value_heads") if given else heads)


def _of_heads(config: Any, kv_heads: int) -> tuple[int, ...]:
    heads = _count(config, "num_attention_heads")
    if heads % kv_heads:
        raise InvalidConfig(f"num_key_value_heads is {kv_heads}; {heads} heads cannot share so many evenly")
    if getattr(config, "head_dim", None) is not None:
        return (kv_heads * _count(config, "head_dim") * _SIZE,) * 2
    hidden = _count(config, "hidden_size")
    if hidden % heads:
        raise InvalidConfig(f"hidden_size is {hidden}; it is no multiple of {heads} heads, and head_dim is missing")
    return (kv_heads * (hidden // heads) * _SIZE,) * 2


def _falcon(config: Any, name: str) -> tuple[int, ...]:
    """One head, all heads, or as many as the new architecture's configuration says. transformers keeps these repeated; here each is kept once."""
    if config.new_decoder_architecture:
        older = hasattr(config, "num_key_value_heads")
        return _of_heads(config, _count(config, "num_key_value_heads" if older else "num_kv_heads"))
    return _of_heads(config, 1 if config.multi_query else _count(config, "num_attention_heads"))


def _mimo(config: Any, name: str) -> tuple[int, ...]:
    """Windows have twice the heads. Values have another width than keys."""
    heads = _count(config, "num_key_value_heads") * (2 if name == "window" else 1)
    return (heads * _count(config, "head_dim") * _SIZE, heads * _count(config, "v_head_dim") * _SIZE)


def _latent(config: Any, name: str) -> tuple[int, ...]:
    return ((_count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim")) * _SIZE,)


def _index_key(config: Any) -> tuple[int, ...]:
    """An index key; () for Qwen4-exp without an indexer."""
    if getattr(config, "indexer_head_dim", 0) is None:
        return ()
    return (_count(config, "indexer_head_dim" if hasattr(config, "indexer_head_dim") else "index_head_dim") * _SIZE,)


def _one_head(config: Any, name: str) -> tuple[int, ...]:
    """DeepSeek-V4: K of one head, which is also its V."""
    return (_count(config, "head_dim") * _SIZE,)


def _deepseek_4(config: Any, layer_type: str) -> Compressed:
    """Heavily compressed: an entry of K. Else an entry of K and an index key, which overlap."""
    rates = config.compress_rates
    if not isinstance(rates, dict) or not isinstance(stride := rates.get(layer_type), int) or stride < 2:
        raise InvalidConfig(
            f"compress_rates is {rates!r}; it has to have a whole number of at least 2 for {layer_type}"
        )
    if layer_type == "heavily_compressed_attention":
        return Compressed(stride, (_count(config, "head_dim"),), overlaps=False)
    return Compressed(stride, (_count(config, "head_dim"), _count(config, "index_head_dim")), overlaps=True)


# Functions for _Kind.parts and _Kind.numbered.


def _state_size(kind: _Kind, config: Any) -> int:
    for field in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        if named := getattr(config, field, None):
            if (name := str(named).removeprefix("torch.")) not in _STATE_SIZES:
                raise InvalidConfig(f"{field} is {name}; known are {', '.join(_STATE_SIZES)}")
            return _STATE_SIZES[name]
    return kind.state_size


def _conv(channels: int, kernel: int, element: int) -> tuple[Part, ...]:
    tail = -(-channels // CONV_PIECES) * (kernel - 1) * element
    return (Part(units=CONV_PIECES, unit_bytes=tail),) if tail else ()


def _delta(config: Any, size: int, element: int) -> tuple[Part, ...]:
    """A gated delta rule: a matrix for each value head, and a short convolution over queries, keys and values."""
    heads, key_heads = _count(config, "linear_num_value_heads"), _count(config, "linear_num_key_heads")
    key, value = _count(config, "linear_key_head_dim"), _count(config, "linear_value_head_dim")
    channels = 2 * key_heads * key + heads * value
    return (
        Part(units=heads, unit_bytes=key * value * size),
        *_conv(channels, _count(config, "linear_conv_kernel_dim"), element),
    )


def _ngrams(config: Any, number: int, sizes: Sizes) -> tuple[Part, ...]:
    """Qwen4-exp's embeddings of n-grams: the last token ids, and columns of a dilated convolution."""
    if number + 1 not in config.ple_layer_ids:
        return ()
    channels, ngram = _count(config, "hidden_size") * _count(config, "hc_count"), _count(config, "ngram_size")
    columns = (_count(config, "ple_conv_kernel_size") - 1) * ngram
    return (*_conv(channels, columns + 1, sizes.element), Part(units=1, unit_bytes=(ngram - 1) * sizes.token_id))


def _kimi_delta(config: Any, size: int, element: int) -> tuple[Part, ...]:
    heads, dim = _count(config, "linear_num_heads"), _count(config, "linear_head_dim")
    return (
        Part(units=heads, unit_bytes=dim * dim * size),
        *_conv(3 * heads * dim, _count(config, "linear_conv_kernel_dim"), element),
    )


def _delayed(config: Any, size: int, element: int) -> tuple[Part, ...]:
    """Zaya: two convolutions over queries and keys, one after the other, and half of a token's values for the next token."""
    heads, kv_heads = _count(config, "num_attention_heads"), _count(config, "num_key_value_heads")
    dim, kernels = _count(config, "head_dim"), _count(config, "cca_time0") + _count(config, "cca_time1")
    return (
        Part(units=1, unit_bytes=kv_heads * dim // 2 * element),
        *_conv((heads + kv_heads) * dim, kernels - 1, element),
    )


def _lightning(config: Any, size: int, element: int) -> tuple[Part, ...]:
    heads = _count(config, "num_attention_heads")
    dim = _of_heads(config, heads)[0] // heads // _SIZE
    return (Part(units=heads, unit_bytes=dim * dim * size),)


def _mamba2(heads: str, dim: str, state: str, groups: str, kernel: str) -> Callable[[Any, int, int], tuple[Part, ...]]:
    """A matrix for each head, and a convolution. The arguments are the names of the fields with their sizes."""

    def parts(config: Any, size: int, element: int) -> tuple[Part, ...]:
        inner, kept = _count(config, heads) * _count(config, dim), _count(config, state)
        return (
            Part(units=_count(config, heads), unit_bytes=_count(config, dim) * kept * size),
            *_conv(inner + 2 * _count(config, groups) * kept, _count(config, kernel), element),
        )

    return parts


def _rows_of_state(channels: int, state: int, kernel: int, size: int, element: int) -> tuple[Part, ...]:
    """Mamba: a row of state for each channel, in 64 pieces of channels if these divide, and a convolution."""
    pieces = 64 if channels % 64 == 0 else 1
    return (Part(units=pieces, unit_bytes=channels // pieces * state * size), *_conv(channels, kernel, element))


def _mamba(config: Any, size: int, element: int) -> tuple[Part, ...]:
    return _rows_of_state(
        _count(config, "intermediate_size"), _count(config, "state_size"), _count(config, "conv_kernel"), size, element
    )


def _jamba(config: Any, size: int, element: int) -> tuple[Part, ...]:
    channels = _count(config, "mamba_expand") * _count(config, "hidden_size")
    return _rows_of_state(channels, _count(config, "mamba_d_state"), _count(config, "mamba_d_conv"), size, element)


def _short_conv(config: Any, size: int, element: int) -> tuple[Part, ...]:
    return _conv(_count(config, "hidden_size"), _count(config, "conv_L_cache"), element)


def _zamba(config: Any, size: int, element: int) -> tuple[Part, ...]:
    channels, heads = _count(config, "mamba_expand") * _count(config, "hidden_size"), _count(config, "n_mamba_heads")
    return (
        Part(units=heads, unit_bytes=channels // heads * _count(config, "mamba_d_state") * size),
        *_conv(channels, _count(config, "mamba_d_conv"), element),
    )


def _gated_unit(config: Any, size: int, element: int) -> tuple[Part, ...]:
    """RecurrentGemma: a number for each channel, and a convolution."""
    channels = _count(config, "lru_width")
    return (Part(units=1, unit_bytes=channels * size), *_conv(channels, _count(config, "conv1d_width"), element))


def _xlstm(config: Any, size: int, element: int) -> tuple[Part, ...]:
    """A matrix for each head, the weight of its keys, and their scale."""
    heads, keys = _count(config, "num_heads"), _count(config, "qk_head_dim")
    return (
        Part(units=heads, unit_bytes=keys * _count(config, "v_head_dim") * size),
        Part(units=1, unit_bytes=heads * keys * size),
        Part(units=1, unit_bytes=heads * size),
    )


def _rwkv(config: Any, size: int, element: int) -> tuple[Part, ...]:
    """A sum, its weight and their scale; and the previous token, for each of the two mixings."""
    return (
        Part(units=3, unit_bytes=_count(config, "attention_hidden_size") * size),
        Part(units=2, unit_bytes=_count(config, "hidden_size") * element),
    )


_MAMBA_2 = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
_NEMOTRON = _mamba2("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
_ZAMBA_2 = _mamba2("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv")
_PURE_MAMBA_2 = _mamba2("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
_PLAIN = """
    afmoe apertus arcee aria_text beam biogpt bitnet bloom codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm dbrx
    diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa
    granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder
    jais2 jetmoe kolibri1 laguna llama llama4_text mellum minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
    modernbert-decoder moshi mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_5_vl_text qwen2_moe
    qwen2_vl_text qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm
"""
"""Kinds of model whose layers all keep K and V of `num_key_value_heads` heads."""
_LATENTS = """
    axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite glm_moe_dsa hy_v4 longcat_flash minicpm3 youtu
"""
_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(_PLAIN.split(), _Kind(_kv)),
    "deepseek_v4": _Kind(_one_head, compressed=_deepseek_4),
    "falcon": _Kind(_falcon),
    "mimo_v2_flash": _Kind(_mimo),
    **dict.fromkeys(_LATENTS.split(), _Kind(_latent)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _Kind(_kv, _delta)),
    "qwen4_exp_text": _Kind(_kv, _delta, numbered=_ngrams),
    "olmo_hybrid": _Kind(_kv, _delta, state_size=4),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _Kind(_latent, _kimi_delta, state_size=4)),
    "minimax": _Kind(_kv, _lightning, state_size=4),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _Kind(_kv, _MAMBA_2)),
    "nemotron_h": _Kind(_kv, _NEMOTRON),
    "jamba": _Kind(_kv, _jamba, state_size=4),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _Kind(_kv, _short_conv)),
    **dict.fromkeys(("mamba", "falcon_mamba"), _Kind(_kv, _mamba)),
    "mamba2": _Kind(_kv, _PURE_MAMBA_2),
    "recurrent_gemma": _Kind(_kv, _gated_unit, state_size=4),
    "rwkv": _Kind(_kv, _rwkv, state_size=4, layer_type="linear_attention"),
    "xlstm": _Kind(_kv, _xlstm, state_size=4, layer_type="linear_attention"),
    "zamba": _Kind(_kv, _zamba),
    "zamba2": _Kind(_kv, _ZAMBA_2),
    "zaya": _Kind(_kv, _delayed),
}
