"""A model's shape, read from a config.json in the Hugging Face layout.

Kinds of models (`model_type`) are in `KINDS` if their count of parameters is within a hundredth of that of transformers' own module; others are
refused by name. So are fields that change the figures and are not modelled, such as a state that layers keep. `ModelShape.not_modelled` names the
parts that the figures leave out.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from paged.base.arguments import is_integer
from paged.errors import BadHardwareFile, InvalidConfig, ModelError, NotModelled
from paged.model.kept_layers import MOST
from paged.model.layer_plan import Layers
from paged.model.model_shape import BF16, Experts, Latent, ModelShape
from paged.model.quantised.names import StoredCodes, listed_names, names_of

_TEXT = ("text_config", "language_config", "llm_config")
_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}
"""Names of the same fields in older kinds of models."""
_STATES = (
    "linear_num_value_heads", "linear_attn_config", "mamba_d_state", "mamba_num_heads", "state_size",
    "ssm_state_size", "conv_L_cache", "lru_width", "attn_layer_period", "hybrid_override_pattern",
    "layers_block_type", "block_types", "attn_type_list", "attention_hidden_size",
)  # fmt: skip
"""Fields of layers that keep a state of one size instead of K and V."""
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_FLOATS = ("ignore", "modules_to_not_convert", "dynamic")
"""Fields of a quantisation that name linear layers which stay floats."""
_FP8, _MXFP4_BITS = {"fp8", "fbgemm_fp8"}, 4.25


def is_config(document: Any) -> bool:
    """Whether a JSON document is a configuration in that layout, and not one of our own."""
    return isinstance(document, dict) and ("model_type" in document or "architectures" in document)


def name_of(path: Path) -> str:
    """Return the name of a configuration's model: that of its folder, or of the file if it is not called config.json."""
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def with_usual_names(document: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose sizes have their usual names as well as older ones: not every class reads both."""
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    found = {name: document[other] for name in usual for other in _NAMES[name] if document.get(other) is not None}
    return {**found, **{name: value for name, value in document.items() if value is not None or name not in found}}


def shape_of_config(path: Path, document: dict[str, Any]) -> ModelShape:
    """Return the shape. Raises BadHardwareFile with a field that is missing, contradicts another, or is not modelled; NotModelled for a kind of model."""
    return _Reader(path, document).shape()


class _Reader:
    """Reads one configuration; `text` is the decoder's part of it."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path, self.whole = path, document
        inside = next((document[name] for name in _TEXT if isinstance(document.get(name), dict)), None)
        self.text = document if inside is None else inside
        self.model_type = str(self.text.get("model_type") or document.get("model_type"))
        self._refuse_states()
        if self.model_type not in KINDS:
            known = ", ".join(sorted(KINDS))
            raise NotModelled(path, "model_type", f"{self.model_type} is not known; known are {known}")
        self.kind = KINDS[self.model_type]

    def shape(self) -> ModelShape:
        """Return the shape of the model."""
        self._refuse_others()
        kind, layers, heads = self.kind, self.count("num_hidden_layers"), self.count("num_attention_heads")
        hidden, longest = self.count("hidden_size"), self.count("max_position_embeddings")
        latent = self._latent()
        head_dim = self.number("head_dim") or (0 if hidden % heads else hidden // heads)
        if not head_dim:
            self._fail("head_dim", f"it is missing, and hidden_size {hidden:,} is no multiple of {heads} heads")
        kv_heads = heads if latent else self._kv_heads(heads)
        if heads % kv_heads:
            self._fail("num_key_value_heads", f"it is {kv_heads}; {heads} heads cannot share so many evenly")
        experts = self._experts(layers)
        dtype, bits, codes = self._quantised(experts)
        if experts is not None and bits is not None:
            experts = msgspec.structs.replace(experts, bits=bits)
        if codes is not None and (experts or latent):
            # It is not known which of their weights are codes.
            codes = StoredCodes(title=codes.title)
        said = [*self._left_out(layers), *self._left_of(codes)]
        try:
            return ModelShape(
                name=name_of(self.path),
                hidden=hidden,
                layers=layers,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                intermediate=self._intermediate(hidden),
                vocab=self.count("vocab_size"),
                max_length=longest,
                tied_embeddings=self.flag("tie_word_embeddings", kind.tied),
                gated_mlp=kind.gated,
                bias=self._bias(),
                qk_norm=self.flag("use_qk_norm", kind.qk_norm),
                learned_positions=0 if kind.positions is None else longest + kind.positions,
                experts=experts,
                latent=latent,
                dtype=dtype,
                codes=codes,
                kept=() if latent else self._kept(layers, longest, kv_heads * head_dim * BF16),
                not_modelled=tuple(said),
                source=f"{self.path}",
            )
        except InvalidConfig as error:
            raise BadHardwareFile(self.path, None, str(error)) from None

    def given(self, name: str) -> Any:
        """Return a field by any of its names, or its kind's default if it is left out; None if there is neither."""
        found = {each: self.text[each] for each in (name, *_NAMES.get(name, ())) if self.text.get(each) is not None}
        if not found:
            return None if name in self.text else self.kind.defaults.get(name)
        (first, value), *others = found.items()
        # A tokenizer's longest text may differ.
        if name != "max_position_embeddings" and (differing := [each for each, other in others if other != value]):
            self._fail(first, f"it is {value!r}, and {differing[0]} is {found[differing[0]]!r}")
        return value

    def number(self, name: str) -> int:
        """Return a whole number, 0 if the field is missing."""
        return self._whole(name, self.given(name) or 0, "")

    def listed(self, name: str) -> list[Any]:
        """Return a list, empty if the field is missing."""
        value = self.text.get(name) or []
        if not isinstance(value, list):
            self._fail(name, f"it is {value!r}; it has to be a list")
        return value

    def count(self, name: str) -> int:
        """Return a whole number of at least 1, which has to be there."""
        value = self.given(name)
        if value is None:
            others = _NAMES.get(name, ())
            self._fail(name, f"it is missing{', by its other names too: ' + ', '.join(others) if others else ''}")
        return self._whole(name, value, " of at least 1")

    def _whole(self, name: str, value: Any, bound: str) -> int:
        if not is_integer(value) or value < bool(bound):
            self._fail(name, f"it is {value!r}; it has to be a whole number{bound}, the same for all layers")
        if value > MOST:
            self._fail(name, f"it is {str(value)[:20]}…; no model has more than {MOST:,}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a flag of the decoder, or of the whole configuration."""
        value = self.text.get(name, self.whole.get(name))
        return default if value is None else bool(value)

    def _fail(self, field: str, problem: str) -> Any:
        raise BadHardwareFile(self.path, field, problem)

    def _refuse_states(self) -> None:
        kinds = set(map(str, self.listed("layer_types"))) - _ATTENTION
        for field in ("layer_types",) if kinds else (name for name in _STATES if self.text.get(name)):
            what = f"of {', '.join(sorted(kinds))}" if kinds else "that it describes"
            problem = f"{self.model_type} has layers {what} that keep a state instead of K and V: not modelled"
            raise NotModelled(self.path, field, problem)

    def _refuse_others(self) -> None:
        """Raise BadHardwareFile for a field that would make the figures wrong."""
        if self.whole.get("is_encoder_decoder"):
            self._fail("is_encoder_decoder", "only decoders are modelled")
        same = (None, self.text.get("hidden_size"))
        if self.model_type == "opt" and self.text.get("word_embed_proj_dim") not in same:
            self._fail("word_embed_proj_dim", "an embedding of another width than the layers is not modelled")
        types, layers = self.listed("layer_types"), self.count("num_hidden_layers")
        if types and len(types) != layers:
            self._fail("layer_types", f"it has {len(types)} layers; num_hidden_layers is {layers}")
        if not self.kind.experts and self.number("num_experts") > 1:
            self._fail("num_experts", f"{self.model_type} is known without experts")
        if self.text.get("kv_lora_rank") and not self.model_type.startswith("deepseek"):
            self._fail("kv_lora_rank", f"{self.model_type} is known without latents")

    def _kv_heads(self, heads: int) -> int:
        is_old_falcon = self.model_type == "falcon" and not self.text.get("new_decoder_architecture")
        if is_old_falcon or self.model_type == "gpt_bigcode":
            return 1 if self.flag("multi_query", True) else heads
        return heads if self.given("num_key_value_heads") is None else self.count("num_key_value_heads")

    def _latent(self) -> Latent | None:
        if not self.model_type.startswith("deepseek"):
            return None
        return Latent(
            kv_rank=self.count("kv_lora_rank"),
            rope_dim=self.count("qk_rope_head_dim"),
            query_rank=self.number("q_lora_rank"),
            nope_dim=self.count("qk_nope_head_dim"),
            value_dim=self.count("v_head_dim"),
        )

    def _intermediate(self, hidden: int) -> int:
        if self.model_type == "llama4_text":
            return self.count("intermediate_size_mlp")
        if self.given("intermediate_size") is None and not self.kind.gated:
            return 4 * hidden
        return self.count("intermediate_size")

    def _bias(self) -> Literal["none", "qkv", "all"]:
        if self.model_type == "falcon":
            return "all" if self.text.get("bias") else "none"
        asks = self.text.get("attention_bias") or self.text.get("use_qkv_bias")
        return "qkv" if asks and self.kind.bias == "none" else self.kind.bias

    def _experts(self, layers: int) -> Experts | None:
        if not self.kind.experts:
            return None
        width = self.number("moe_intermediate_size") or self.count("intermediate_size")
        shared = self.number("n_shared_experts") or (1 if self.model_type == "llama4_text" else 0)
        beside = self.number("shared_expert_intermediate_size")
        if beside % width:
            self._fail(
                "shared_expert_intermediate_size", f"it is {beside:,}, no multiple of an expert's width {width:,}"
            )
        return Experts(
            count=self.count("num_experts"),
            per_token=self.count("num_experts_per_tok"),
            intermediate=width,
            shared=shared + beside // width,
            dense_layers=self._dense_layers(layers),
        )

    def _dense_layers(self, layers: int) -> int:
        if self.text.get("moe_layer_freq", 1) != 1:
            self._fail("moe_layer_freq", f"it is {self.text['moe_layer_freq']}; 1 is modelled")
        first = self.number("first_k_dense_replace")
        every = self.number("decoder_sparse_step") or self.number("interleave_moe_layer_step") or 1
        plain = self.listed("mlp_only_layers")
        return sum(at < first or at in plain or (at + 1) % every > 0 for at in range(layers))

    def _kept(self, layers: int, longest: int, entry: int) -> tuple[Layers, ...]:
        """Return what layers keep if some attend to a part of the context; else (). `entry`: bytes of K, or of V, of a token."""
        types, narrow_ones = self.listed("layer_types"), []
        window, chunk = self.number("sliding_window"), self.number("attention_chunk_size")
        every = self.text.get("sliding_window_pattern")
        every = every if isinstance(every, int) else self.kind.full_every
        narrow = layers - (layers // every if every else 0)
        if self.model_type.startswith("qwen"):
            window = window if self.flag("use_sliding_window", False) else 0
            narrow = layers - min(self.number("max_window_layers"), layers)
        kinds: tuple[tuple[int, Literal["window", "chunk"], str], ...] = (
            (window, "window", "sliding_attention"),
            (chunk, "chunk", "chunked_attention"),
        )
        for size, kind, named in kinds:
            count = types.count(named) if types else narrow
            if size and count and size < longest:
                narrow_ones.append(Layers(kind=kind, count=count, entry=(entry, entry), reach=size))
        full = layers - sum(each.count for each in narrow_ones)
        if not narrow_ones:
            return ()
        return (*([Layers(kind="full", count=full, entry=(entry, entry))] if full else []), *narrow_ones)

    def _left_out(self, layers: int) -> list[str]:
        """Return sentences on parts of the model that no figure counts."""
        shared, more = self.number("num_kv_shared_layers"), self.number("num_nextn_predict_layers")
        towers = [name for name in ("audio", "vision") if f"{name}_config" in self.whole]
        parts = {
            f"K and V that {shared or 'some'} of {layers} layers take from others: each is counted with its own": (
                shared or self.text.get("use_cla")
            ),
            f"layers that guess tokens ahead, {more} beside the {layers}: their weights and K and V are not counted": more,
            "attention to chosen tokens alone, and the index that chooses: all of the context is counted as read": (
                self.text.get("index_topk")
            ),
            f"what reads {' and '.join(towers)}: its weights are not counted": towers,
        }
        return [words for words, has in parts.items() if has]

    @property
    def _settings(self) -> dict[str, Any] | None:
        """The configuration's quantisation."""
        found = self.text.get("quantization_config") or self.whole.get("quantization_config")
        return found if isinstance(found, dict) else None

    def _quantised(self, experts: Experts | None) -> tuple[Literal["fp8"] | None, float | None, StoredCodes | None]:
        """Return the dtype of the weights if it has 8 bits, the experts' bits, and how linear layers are stored as codes; None each if not so."""
        found = self._settings
        if found is None:
            return None, None, None
        method = str(found.get("quant_method"))
        if method == "mxfp4" and experts is not None:
            return None, _MXFP4_BITS, None
        groups = found.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        weights = [group.get("weights") or {} for group in groups if isinstance(group, dict)]
        is_fp8 = bool(weights) and all((each.get("num_bits"), each.get("type")) == (8, "float") for each in weights)
        if method in _FP8 or is_fp8 or str(found.get("quant_algo")) == "FP8":
            return "fp8", None, None
        bits = found.get("bits") or found.get("w_bit") or next((each.get("num_bits") for each in weights), None)
        title = method + (f" with {bits} bits" if bits else "")
        return None, None, self._codes(found) or StoredCodes(title=title)

    def _codes(self, settings: dict[str, Any]) -> StoredCodes | None:
        """Return how linear layers are stored; None for a format that our engine does not read, or without the engine's packages."""
        try:
            from paged.model.quantised.checkpoints import format_of
        except ImportError:
            return None
        try:
            codes = format_of(settings, self.path).codes
        except ModelError:
            return None
        # compressed-tensors has scales in the dtype of the weights, the others in 16 bits.
        is_wide = str(self.text.get("dtype") or self.text.get("torch_dtype")) == "float32"
        is_wide &= settings.get("quant_method") == "compressed-tensors"
        return msgspec.structs.replace(codes, scale_bytes=4) if is_wide else codes

    def _left_of(self, codes: StoredCodes | None) -> list[str]:
        """Return sentences on linear layers that the figures count differently from how they are stored."""
        if codes is None or self._settings is None:
            return []
        if codes.bits is None:
            return [f"weights in {codes.title}, as published: they are counted in the dtype of the rest"]
        said, counted = [], f"they are counted in {codes.title}"
        try:
            only = listed_names(self._settings.get("modules_in_block_to_quantize"))
            listed = {each for name in _FLOATS for each in names_of(self._settings.get(name))}
        except (TypeError, ValueError) as error:
            self._fail("quantization_config", str(error))
        if only:
            said.append(f"linear layers other than {', '.join(only)} stay floats: {counted}")
        # The head is counted as floats.
        floats = {each.removeprefix("-:") for each in listed if not each.removesuffix("$").endswith("lm_head")}
        return [*said, f"layers that stay floats, as {min(floats)}: {counted}"] if floats else said


class Kind(msgspec.Struct, frozen=True):
    """Facts of a `model_type` that its configuration does not have.

    positions   rows of the table of position embeddings beyond the longest sequence; None: there is no such table
    full_every  one layer in so many attends to all of the context if a window is named; 0: none does
    experts     MLPs are mixtures of experts
    defaults    fields that published configurations leave out
    """

    gated: bool = True
    bias: Literal["none", "qkv", "all"] = "none"
    tied: bool = False
    qk_norm: bool = False
    positions: int | None = None
    full_every: int = 0
    experts: bool = False
    defaults: dict[str, Any] = {}


_WINDOW = {"sliding_window": 4096}
_GEMMA3 = {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    **_WINDOW,
}
KINDS = {
    "cohere2": Kind(tied=True, full_every=4, defaults=_WINDOW),
    "falcon": Kind(gated=False, tied=True, defaults={"max_position_embeddings": 2048}),
    "gemma": Kind(tied=True, defaults={"head_dim": 256}),
    "gemma2": Kind(tied=True, full_every=2, defaults={"head_dim": 256, **_WINDOW}),
    "gemma3_text": Kind(tied=True, qk_norm=True, full_every=6, defaults=_GEMMA3),
    "glm4": Kind(defaults={"head_dim": 128}),
    "gpt_oss": Kind(bias="all", full_every=2, experts=True, defaults={"sliding_window": 128}),
    "llama4_text": Kind(experts=True, full_every=4, defaults={"attention_chunk_size": 8192}),
    "olmo2": Kind(qk_norm=True),
    "opt": Kind(gated=False, bias="all", tied=True, positions=2),
    "qwen2_moe": Kind(bias="qkv", experts=True),
    "qwen3": Kind(qk_norm=True, defaults={"head_dim": 128}),
    "qwen3_moe": Kind(qk_norm=True, experts=True),
    "starcoder2": Kind(gated=False, bias="all", tied=True),
    **dict.fromkeys(("cohere", "ernie4_5", "smollm3"), Kind(tied=True)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "phimoe"), Kind(experts=True)),
    **dict.fromkeys(("exaone4", "olmo3"), Kind(qk_norm=True, full_every=4, defaults=_WINDOW)),
    **dict.fromkeys(("ministral", "mistral"), Kind(defaults=_WINDOW)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), Kind(gated=False, bias="all", tied=True, positions=0)),
    **dict.fromkeys(("gpt_neox", "phi"), Kind(gated=False, bias="all")),
    **dict.fromkeys(("granite", "llama", "olmo", "phi3", "stablelm"), Kind()),
    **dict.fromkeys(
        ("qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "seed_oss"), Kind(bias="qkv")
    ),
}
