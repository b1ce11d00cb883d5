"""Small configurations: every kind of layer twice, narrow, with short limits, so that a model is built and runs in milliseconds.

The names of fields tell what a number is. Equal limits stay equal, and longer ones longer; heads stay grouped as they are; ids of special tokens lie
within the small vocabulary.
"""

from __future__ import annotations

import copy
import re
from typing import Any

VOCABULARY, LONGEST = 128, 64
# Patterns of names, and the largest value that such a field keeps.
_WIDTHS = {
    r".*hidden_size|n_embd|d_model|word_embed_proj_dim|embedding_(size|dim)|projection_dim|lru_width": 64,
    r"num_attention_heads|n_heads?|num_heads": 4,
    r".*(intermediate_size|ffn_dim|ffn_hidden_size)(_mlp)?|n_inner|d_ff|mlp_dim|.*expert_dim": 96,
    r".*lora_rank|.*low_rank_dim": 16,
    r".*hidden_size_per_layer_input|mamba_d_head": 16,
    r"mamba_n_heads|mamba_num_heads|n_mamba_heads": 8,
}
_COUNTS = {
    r"vocab_size(_per_layer_input)?": VOCABULARY,
    r".*num_.*experts|n_routed_experts|moe_num_experts|expert_num": 8,
    r"(moe_)?num_experts_per_tok(en)?|moe_k|moe_topk|num_selected_experts|experts_per_token|n_shared_experts": 2,
    r"n_group|num_expert_group|index_topk_blocks|num_layers_per_stack": 2,
    r"index_block_size": 4,
    r"zero_expert_num|first_k_dense_replace|moe_layer_start_index": 2,
}
_HEAD_SIZE = r".*head_dim|kv_channels|attention_head_size|rotary_dim"
_KV_HEADS = r"num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|num_global_key_value_heads"
_LAYERS = r"num_(hidden_)?layers|n_layers?|num_blocks"
# Fields with a period: in each so many layers one is of another kind.
_PERIOD = r".*(_interval|_step|_freq|_pattern|_period)"
# Fields that list the layers of another kind.
_NUMBERS = r".*layer_(ids|indices)|.*attn_idxs|moe_layers|mlp_only_layers"
_MAX_LENGTH = r"max_position_embeddings|model_max_length|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length"
_LENGTH = rf"{_MAX_LENGTH}|.*sliding_window|.*window_size|attention_window|.*chunk_size|original_max_position_embeddings|floor_scale|index_topk"
# The first small limit, and the step to each next one, in the order of the large limits: prompts of up to LONGEST lie on both sides of each.
_FIRST_LIMIT, _NEXT_LIMIT = 9, 6
_LONGEST_PERIOD = 8


class Shrunk:
    """A small configuration, `config`.

    layers   for each of its layers, the number of the layer in the large configuration
    lengths  its limits of length, rising
    """

    def __init__(self, config: Any, *, is_narrow: bool = True) -> None:
        """Make a configuration small, which stays as it is. Not `is_narrow`: widths stay as they are, too."""
        config = copy.deepcopy(config)
        values = config.to_dict()
        text = config.get_text_config()
        # Some have only a list of layers, and the number as a property.
        counts = (v for k, v in text.to_dict().items() if re.fullmatch(_LAYERS, k))
        self._num_layers = next(counts, None) or text.num_hidden_layers
        self.layers = _layers(text.to_dict(), self._num_layers)
        found = sorted({v for k, v in _pairs(values) if re.fullmatch(_LENGTH, k) and _is_number(v)})
        longest = [v for k, v in _pairs(values) if re.fullmatch(_MAX_LENGTH, k) and _is_number(v)]
        self._lengths = {
            length: min(length, LONGEST if length in longest else _FIRST_LIMIT + _NEXT_LIMIT * place)
            for place, length in enumerate(found)
        }
        self.lengths = sorted(set(self._lengths.values()))
        self._is_narrow = is_narrow
        self.config = type(config).from_dict(self._small(values))

    def _small(self, values: dict[str, Any], scale: float | None = None) -> dict[str, Any]:
        """Return the fields of a configuration, or of one within it, made small. `scale`: factor of the sizes of heads; None: computed from the fields."""
        small = {}
        heads = next((v for k, v in values.items() if re.fullmatch(r"num_attention_heads|n_heads?", k)), None)
        sizes = [v for k, v in values.items() if re.fullmatch(_HEAD_SIZE, k) and _is_number(v)]
        if not sizes and heads:
            sizes = [v // heads for k, v in values.items() if k in ("hidden_size", "n_embd") and _is_number(v)]
        if scale is None:
            scale = _head_scale(sizes) if self._is_narrow else 1.0
        for name, value in values.items():
            small[name] = self._value(name, value, heads, scale)
        if _is_number(small.get("topk_group")):
            groups = "n_group" if "n_group" in values else "num_expert_group"
            small["topk_group"] = 1 if values["topk_group"] < values[groups] else small[groups]
        if _is_number(small.get("num_layers_per_stack")):
            # Two stacks of layers: a pass goes L_cycles times through one, then once through the other, H_cycles times.
            small["num_hidden_layers"] = small["num_layers_per_stack"] * small["H_cycles"] * (small["L_cycles"] + 1)
        if self._is_narrow:
            _match_sizes(small, values)
        return small

    def _value(self, name: str, value: Any, heads: Any, scale: float) -> Any:
        if isinstance(value, dict):
            if name == "compress_rates":
                # Tokens of an entry become 2, 4 and so on, in the order of their sizes.
                rates = sorted(set(value.values()))
                return {kind: min(rate, 2 << rates.index(rate)) for kind, rate in value.items()}
            if name.startswith("rope"):
                return self._rope(value, scale)
            if name == "per_layer_config":
                of_layers = {int(layer): its for layer, its in value.items()}
                kept = [(new, of_layers[old]) for new, old in enumerate(self.layers) if old in of_layers]
                return {new: self._small({"num_attention_heads": heads} | its, scale) for new, its in kept}
            return self._small(value) if "model_type" in value else value
        if isinstance(value, list):
            if re.fullmatch(_NUMBERS, name):
                return [new for new, old in enumerate(self.layers) if old in value]
            if len(value) == self._num_layers:
                value = [value[each] for each in self.layers]
            return [self._value(name, each, heads, scale) for each in value]
        if name.endswith(("token_id", "token_index")):
            return _special_id(name, value)
        if not _is_number(value):
            return value
        if name == "num_kv_shared_layers":
            return sum(layer >= self._num_layers - value for layer in self.layers)
        if re.fullmatch(_LAYERS, name):
            return len(self.layers) if value == self._num_layers else min(value, 2)
        if value in self._lengths and re.fullmatch(_LENGTH, name):
            return self._lengths[value]
        if self._is_narrow and re.fullmatch(_HEAD_SIZE, name):
            return int(value * scale)
        if self._is_narrow and re.fullmatch(_KV_HEADS, name):
            return 4 if value == heads else min(value, 2)
        for table in (_WIDTHS, _COUNTS) if self._is_narrow else (_COUNTS,):
            for pattern, most in table.items():
                if re.fullmatch(pattern, name):
                    return min(value, most)
        return value

    def _rope(self, values: dict[str, Any], scale: float) -> dict[str, Any]:
        small: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, dict):
                small[name] = self._rope(value, scale)
            elif isinstance(value, list) and name.endswith("section"):
                small[name] = [int(each * scale) for each in value]
            elif isinstance(value, list):
                count = max(1, round(len(value) * scale))
                small[name] = [value[place * len(value) // count] for place in range(count)]
            else:
                small[name] = self._lengths.get(value, value) if re.fullmatch(_LENGTH, name) else value
        return small


def _layers(values: dict[str, Any], count: int) -> list[int]:
    """Return the first two layers of every kind, where kinds differ in any list with an entry for each layer; or the first four layers, or two periods, if
    that is more."""
    lists = [
        value
        for name, value in values.items()
        if isinstance(value, list) and len(value) == count and not re.fullmatch(_NUMBERS, name)
    ]
    lists.append([layer >= count - (values.get("num_kv_shared_layers") or 0) for layer in range(count)])
    for name, value in values.items():
        if isinstance(value, list) and re.fullmatch(_NUMBERS, name):
            lists.append([layer in value for layer in range(count)])
    seen: dict[tuple[Any, ...], int] = {}
    chosen = []
    for layer in range(count):
        kind = tuple(map(str, (each[layer] for each in lists)))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 2:
            chosen.append(layer)
    periods = [v for k, v in values.items() if re.fullmatch(_PERIOD, k) and _is_number(v) and v <= _LONGEST_PERIOD]
    least = max([4, *(2 * period for period in periods)]) if len(lists) == 1 else 4
    return chosen if len(chosen) >= least else list(range(min(count, least)))


def _match_sizes(small: dict[str, Any], values: dict[str, Any]) -> None:
    """Adapt sizes that a class computes from others, or compares with them."""
    wide = small.get("hidden_size")
    if _is_number(small.get("expand")) and "num_heads" in small and "num_attention_heads" not in small:
        small["num_heads"] = small["expand"] * wide // small["head_dim"]
    if _is_number(small.get("mamba_d_ssm")) and _is_number(small["mamba_d_head"]):
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    if _is_number(small.get("attention_hidden_size")):
        small["attention_hidden_size"] = values["attention_hidden_size"] * wide // values["hidden_size"]
        if "num_attention_heads" in small:
            small["attention_head_dim"] = small["attention_hidden_size"] // small["num_attention_heads"]
    if _is_number(small.get("mamba_headdim")):
        small["mamba_headdim"] = small["mamba_expand"] * wide // small["n_mamba_heads"]


def _head_scale(sizes: list[int]) -> float:
    """Return the factor of the sizes of heads: the smallest becomes 16, or 8 if there are several sizes; at most 1."""
    return min(1.0, (8 if len(set(sizes)) > 1 else 16) / min(sizes)) if sizes else 1.0


def _special_id(name: str, value: Any) -> Any:
    if not _is_number(value) or value < VOCABULARY:
        return value
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, 3)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _pairs(values: dict[str, Any]) -> Any:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _pairs(value)
        elif isinstance(name, str):
            yield name, value
