"""What the layers of a configuration in the Hugging Face layout keep of a sequence.

Read by kind of model (`model_type`). A kind that is not known here is refused by name, as is a configuration that contradicts itself. Layers
that attend through K and V of an earlier layer keep nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paged.errors import InvalidConfig
from paged.model.layer_plan import Layers, Part

_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2}
_NAMES = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "indexed_attention": "full",
    "compressed_sparse_attention": "window+sparse+sparse_tail",
    "heavily_compressed_attention": "window+heavy+heavy_tail",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "recurrent": "state",
    "mlp": "none",
    "moe": "none",
}
"""Words of `layer_types` and its like."""
CONV_PIECES = 4
"""A convolution's tail lies in four pieces, each of a quarter of its channels."""


class _Kind(NamedTuple):
    """How a kind of model is read: the kind of each layer, the entry of one attention layer, and the parts of one layer's state."""

    types: Callable[[_Config], list[str]]
    entry: Callable[[_Config, str], tuple[int, ...]]
    parts: Callable[[_Config], tuple[Part, ...]]


class _Config:
    """One decoder's configuration. `size` is bytes of an element of K and V, `state_size` of a recurrent state."""

    def __init__(self, fields: Mapping[str, Any], size: int, state_size: int | None) -> None:
        self.fields, self.size = fields, size
        said = fields.get("mamba_ssm_dtype", fields.get("mamba_ssm_cache_dtype"))
        self.state_size = state_size or _BYTES.get(str(said).removeprefix("torch."), size)

    def count(self, *names: str, least: int = 1) -> int:
        """Return the first of these fields that is given, a whole number."""
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise InvalidConfig(f"{name} is {value!r}; it has to be a whole number of at least {least}")
                return value
        raise InvalidConfig(f"{' or '.join(names)} is missing")

    def given(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    @property
    def num_layers(self) -> int:
        listed = self.given("layers_block_type") or ()
        return len(listed) or self.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")

    @property
    def heads(self) -> int:
        return self.count("num_attention_heads", "n_head", "n_heads")

    @property
    def head_dim(self) -> int:
        return self.count("head_dim") if self.given("head_dim") else self.count("hidden_size", "n_embd") // self.heads

    def layer_types(self, usual: Callable[[int], str]) -> list[str]:
        """Return the kind of each layer: as `layer_types` says, or as is usual for the layer of a number from 0."""
        num, said = self.num_layers, self.given("layer_types") or self.given("layers_block_type")
        if said is None:
            return [usual(number) for number in range(num)]
        if not isinstance(said, (list, tuple)) or len(said) != num:
            raise InvalidConfig(f"layer_types has {len(said)} layers; num_hidden_layers is {num}")
        for name in said:
            if name not in _NAMES:
                raise InvalidConfig(f"layer_types: {name} is not known; known are {', '.join(_NAMES)}")
        return [_NAMES[name] for name in said]


def kept_layers(fields: Mapping[str, Any], *, size: int = 2, state_size: int | None = None) -> list[Layers]:
    """Return what a model's layers keep. `fields`: of its decoder's configuration; `size`: bytes of an element of K and V.

    `state_size`: bytes of an element of a recurrent state; None: as the configuration says, or `size`. Raises InvalidConfig for a kind of
    model that is not known, and for a field that is missing, wrong, or contradicts another.
    """
    model_type = str(fields.get("model_type")).removesuffix("_text")
    if model_type not in _KINDS:
        raise InvalidConfig(f"model_type: what layers of {model_type} keep is not known; known are {', '.join(_KINDS)}")
    kind, config = _KINDS[model_type], _Config(fields, size, state_size)
    types = kind.types(config)
    if (shared := config.given("num_kv_shared_layers", 0)) >= len(types) and shared:
        raise InvalidConfig(
            f"num_kv_shared_layers is {shared}; there are {len(types)} layers, and one has to keep K and V"
        )
    counts = Counter(
        name for types_of in types[: len(types) - shared] for name in types_of.split("+") if name != "none"
    )
    if not counts:
        raise InvalidConfig("no layer keeps anything of a sequence")
    return [_layers(kind, config, name, count) for name, count in sorted(counts.items())]


def _layers(kind: _Kind, config: _Config, name: str, count: int) -> Layers:
    if name == "state":
        return Layers(kind="state", count=count, parts=kind.parts(config))
    if name.startswith(("sparse", "heavy")):
        return _compressed(config, name, count)
    entry = kind.entry(config, name)
    if name == "window":
        return Layers(
            kind="window", count=count, entry=entry, reach=config.count("sliding_window", "attention_window_size")
        )
    if name == "chunk":
        return Layers(kind="chunk", count=count, entry=entry, reach=config.count("attention_chunk_size"))
    return Layers(kind="full", count=count, entry=entry)


# What attention stores of a token.


def _kv(config: _Config, name: str) -> tuple[int, ...]:
    heads = config.count("num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")
    if config.heads % heads:
        raise InvalidConfig(f"num_key_value_heads is {heads}; {config.heads} heads cannot share so many evenly")
    bytes_of_head = heads * config.head_dim * config.size
    return (bytes_of_head, bytes_of_head)


def _kv_of_two_shapes(config: _Config, name: str) -> tuple[int, ...]:
    """Heads of their own shape in full layers (Gemma 4), or in windows, and values of another width (MiMo)."""
    own = [each["head_dim"] for each in config.given("per_layer_config", {}).values() if "head_dim" in each]
    if name == "full" and (own or config.given("global_head_dim")):
        heads = config.count("num_global_key_value_heads", "num_key_value_heads")
        return (heads * (own[0] if own else config.count("global_head_dim")) * config.size,) * 2
    heads = config.count(
        "swa_num_key_value_heads" if name == "window" else "num_key_value_heads", "num_key_value_heads"
    )
    dims = config.head_dim, config.count("v_head_dim", "head_dim")
    return tuple(heads * dim * config.size for dim in dims)


def _latent(config: _Config, name: str) -> tuple[int, ...]:
    latent = (config.count("kv_lora_rank") + config.count("qk_rope_head_dim")) * config.size
    return (latent, config.count("index_head_dim") * config.size) if config.given("index_topk") else (latent,)


def _vector(config: _Config, name: str) -> tuple[int, ...]:
    """One vector that is key and value for all heads (DeepSeek V4)."""
    return (config.head_dim * config.size,)


def _compressed(config: _Config, name: str, count: int) -> Layers:
    """One entry for several tokens (DeepSeek V4), or the tokens, with their gates, that wait for their entry.

    Sparse entries overlap, so that twice the tokens wait, and have an index key beside them.
    """
    is_sparse, dim = name.startswith("sparse"), config.head_dim * config.size
    rate = config.given("compress_rates", {}).get(
        f"{'compressed_sparse' if is_sparse else 'heavily_compressed'}_attention", 4 if is_sparse else 128
    )
    index = config.count("index_head_dim") * config.size if is_sparse else 0
    if name.endswith("_tail"):
        return Layers(
            kind="state", count=count, parts=(Part(units=rate * (1 + is_sparse), unit_bytes=2 * (dim + index)),)
        )
    return Layers(kind="full", count=count, stride=rate, entry=(dim, index) if is_sparse else (dim,))


# What a layer's state is.


def _conv(config: _Config, channels: int, tokens: int) -> tuple[Part, ...]:
    return (Part(units=CONV_PIECES, unit_bytes=-(-channels // CONV_PIECES) * tokens * config.size),) if tokens else ()


def _delta(config: _Config) -> tuple[Part, ...]:
    """A gated delta rule: a matrix a value head, and a short convolution over queries, keys and values."""
    heads, key_heads = config.count("linear_num_value_heads"), config.count("linear_num_key_heads")
    key, value = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    channels = 2 * key_heads * key + heads * value
    tail = config.count("linear_conv_kernel_dim") - 1
    return (Part(units=heads, unit_bytes=key * value * config.state_size), *_conv(config, channels, tail))


def _kimi_delta(config: _Config) -> tuple[Part, ...]:
    inner = _Config(config.given("linear_attn_config", config.fields), config.size, config.state_size)
    heads, dim = inner.count("linear_num_heads", "num_heads"), inner.count("linear_head_dim", "head_dim")
    tail = inner.count("linear_conv_kernel_dim", "short_conv_kernel_size") - 1
    return (Part(units=heads, unit_bytes=dim * dim * config.state_size), *_conv(config, 3 * heads * dim, tail))


def _lightning(config: _Config) -> tuple[Part, ...]:
    return (Part(units=config.heads, unit_bytes=config.head_dim**2 * config.state_size),)


def _mamba2(config: _Config) -> tuple[Part, ...]:
    heads, dim = (
        config.count("mamba_n_heads", "mamba_num_heads", "num_heads"),
        config.count("mamba_d_head", "mamba_head_dim", "head_dim"),
    )
    state, groups = (
        config.count("mamba_d_state", "ssm_state_size", "state_size"),
        config.count("mamba_n_groups", "n_groups"),
    )
    channels, tail = heads * dim + 2 * groups * state, config.count("mamba_d_conv", "conv_kernel") - 1
    return (Part(units=heads, unit_bytes=dim * state * config.state_size), *_conv(config, channels, tail))


def _mamba1(config: _Config) -> tuple[Part, ...]:
    """One row of state a channel; in 64 pieces of channels, as kernels go through them."""
    channels = (
        config.count("intermediate_size")
        if config.given("state_size")
        else config.count("mamba_expand") * config.count("hidden_size")
    )
    state, tail = config.count("mamba_d_state", "state_size"), config.count("mamba_d_conv", "conv_kernel") - 1
    pieces = 64 if channels % 64 == 0 else 1
    return (
        Part(units=pieces, unit_bytes=channels // pieces * state * config.state_size),
        *_conv(config, channels, tail),
    )


def _short_conv(config: _Config) -> tuple[Part, ...]:
    return _conv(config, config.count("conv_dim", "hidden_size"), config.count("conv_L_cache") - 1)


def _rg_lru(config: _Config) -> tuple[Part, ...]:
    width = config.count("lru_width", "hidden_size")
    return (
        Part(units=1, unit_bytes=width * config.state_size),
        *_conv(config, width, config.count("conv1d_width") - 1),
    )


def _no_state(config: _Config) -> tuple[Part, ...]:
    raise InvalidConfig("layer_types names layers with a state; this kind of model is known without")


# Which kind each layer is.


def _all(name: str) -> Callable[[_Config], list[str]]:
    return lambda config: config.layer_types(lambda number: name)


def _full_every(every: int, other: str, field: str = "sliding_window") -> Callable[[_Config], list[str]]:
    """Every so manieth layer is full, the others as `other`; all are full where the configuration has no window."""

    def types(config: _Config) -> list[str]:
        step = config.given("sliding_window_pattern") or config.given("full_attention_interval") or every
        step = step if isinstance(step, int) else every
        narrow = other if other == "state" or config.given(field) else "full"
        return config.layer_types(lambda number: narrow if (number + 1) % step else "full")

    return types


def _windowed(config: _Config) -> list[str]:
    """Every layer has the window that the configuration names, if it names one."""
    return config.layer_types(lambda number: "window" if config.given("sliding_window") else "full")


def _qwen(config: _Config) -> list[str]:
    """The first `max_window_layers` layers are full, and all where `use_sliding_window` is off."""
    first = config.given("max_window_layers", 0)
    uses = config.given("use_sliding_window", False) and config.given("sliding_window")
    return config.layer_types(lambda number: "window" if uses and number >= first else "full")


def _gpt_oss(config: _Config) -> list[str]:
    return config.layer_types(lambda number: "full" if number % 2 else "window")


def _by_pattern(config: _Config) -> list[str]:
    """A letter a layer: M keeps a state, * is attention, - and E keep nothing (Nemotron-H)."""
    if config.given("layers_block_type"):
        return config.layer_types(lambda number: "none")
    pattern, names = (
        str(config.given("hybrid_override_pattern", "")),
        {"M": "state", "*": "full", "-": "none", "E": "none"},
    )
    if len(pattern) != config.num_layers or set(pattern) - set(names):
        raise InvalidConfig(
            f"hybrid_override_pattern is {pattern!r}; it has to be {config.num_layers} letters of {', '.join(names)}"
        )
    return [names[letter] for letter in pattern]


def _listed(config: _Config) -> list[str]:
    """Attention in the layers that the configuration lists, a state in the others (Bamba)."""
    full = config.given("attn_layer_indices", [])
    return config.layer_types(lambda number: "full" if number in full else "state")


def _jamba(config: _Config) -> list[str]:
    period, offset = config.count("attn_layer_period"), config.count("attn_layer_offset", least=0)
    return config.layer_types(lambda number: "full" if number % period == offset else "state")


def _kimi(config: _Config) -> list[str]:
    full = config.given("linear_attn_config", {}).get("full_attn_layers", [])
    # Its layers count from 1.
    return config.layer_types(lambda number: "full" if number + 1 in full else "state")


def _minimax(config: _Config) -> list[str]:
    listed = config.given("attn_type_list")
    if listed is not None and len(listed) != config.num_layers:
        raise InvalidConfig(f"attn_type_list has {len(listed)} layers; num_hidden_layers is {config.num_layers}")
    return config.layer_types(lambda number: "full" if (listed[number] if listed else number % 2) else "state")


def _recurrent_gemma(config: _Config) -> list[str]:
    blocks = config.given("block_types") or config.given("_block_types") or ["recurrent", "recurrent", "attention"]
    return ["state" if blocks[number % len(blocks)] == "recurrent" else "window" for number in range(config.num_layers)]


def _mimo(config: _Config) -> list[str]:
    """1 is a window, 0 full attention."""
    pattern = config.given("hybrid_layer_pattern")
    return config.layer_types(lambda number: "window" if pattern and pattern[number] else "full")


_PLAIN = _Kind(_all("full"), _kv, _no_state)
_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(
        (
            *(
                "llama",
                "gemma",
                "glm4",
                "glm4_moe",
                "gpt2",
                "gpt_bigcode",
                "gpt_neox",
                "granite",
                "granitemoe",
                "olmo",
                "olmo2",
                "olmoe",
            ),
            *("opt", "phi", "ernie4_5", "falcon", "seed_oss", "smollm3", "stablelm", "cohere"),
        ),
        _PLAIN,
    ),
    **dict.fromkeys(
        ("mistral", "ministral", "mixtral", "phi3", "phimoe", "starcoder2"), _Kind(_windowed, _kv, _no_state)
    ),
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl"), _Kind(_qwen, _kv, _no_state)
    ),
    **dict.fromkeys(("cohere2", "exaone4", "olmo3"), _Kind(_full_every(4, "window"), _kv, _no_state)),
    "gemma2": _Kind(_full_every(2, "window"), _kv, _no_state),
    **dict.fromkeys(("gemma3", "gemma3n"), _Kind(_full_every(6, "window"), _kv, _no_state)),
    "gemma4": _Kind(_full_every(6, "window"), _kv_of_two_shapes, _no_state),
    "gpt_oss": _Kind(_gpt_oss, _kv, _no_state),
    "llama4": _Kind(_full_every(4, "chunk", "attention_chunk_size"), _kv, _no_state),
    "mimo_v2_flash": _Kind(_mimo, _kv_of_two_shapes, _no_state),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), _Kind(_all("full"), _latent, _no_state)),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"), _Kind(_full_every(4, "state"), _kv, _delta)
    ),
    "deepseek_v4": _Kind(_all("window+heavy+heavy_tail"), _vector, _no_state),
    "phi3small": _PLAIN,
    "kimi_linear": _Kind(_kimi, _latent, _kimi_delta),
    "minimax": _Kind(_minimax, _kv, _lightning),
    "granitemoehybrid": _Kind(_all("full"), _kv, _mamba2),
    "nemotron_h": _Kind(_by_pattern, _kv, _mamba2),
    "bamba": _Kind(_listed, _kv, _mamba2),
    "jamba": _Kind(_jamba, _kv, _mamba1),
    "falcon_h1": _Kind(lambda config: ["full+state"] * config.num_layers, _kv, _mamba2),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _Kind(_all("full"), _kv, _short_conv)),
    "recurrent_gemma": _Kind(_recurrent_gemma, _kv, _rg_lru),
    "mamba": _Kind(_all("state"), _kv, _mamba1),
    "falcon_mamba": _Kind(_all("state"), _kv, _mamba1),
    "mamba2": _Kind(_all("state"), _kv, _mamba2),
}
