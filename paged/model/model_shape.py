"""The shape of a decoder, and what follows from it alone: parameters, and elements that are kept of a token."""

from __future__ import annotations

from typing import Literal

import msgspec

from paged.errors import InvalidConfig
from paged.model.layer_plan import Layers
from paged.model.quantised.names import StoredCodes

BF16 = 2
"""Bytes of an element of K and V as `ModelShape.kept` has them."""


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The MLPs of a mixture of experts.

    count         routed experts of a layer
    per_token     how many of them a token goes through
    shared        experts that every token goes through
    intermediate  width of one expert
    dense_layers  layers that have one plain MLP instead
    bits          bits of a parameter of the routed experts as published, scales included; None: those of the dtype
    """

    count: int
    per_token: int
    intermediate: int
    shared: int = 0
    dense_layers: int = 0
    bits: float | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "count", "per_token", "intermediate")
        _at_least(self, 0, "shared", "dense_layers")
        if self.per_token > self.count:
            raise InvalidConfig(f"per_token is {self.per_token}; there are only {self.count} experts")
        if self.bits is not None and not self.bits > 0:
            raise InvalidConfig(f"bits is {self.bits}; it has to be above 0")


class Latent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): a token's K and V are kept as one vector for all heads.

    kv_rank     elements of the latent from which each head's K and V are projected
    rope_dim    elements of the key beside it that carries the position
    query_rank  elements of the queries' latent; 0: queries have none
    nope_dim    elements of a head's key without position
    value_dim   elements of a head's value
    """

    kv_rank: int
    rope_dim: int
    query_rank: int
    nope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _at_least(self, 1, "kv_rank", "rope_dim", "nope_dim", "value_dim")
        _at_least(self, 0, "query_rank")


class Mixers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that mix tokens by a state instead of attention: their number, and the parameters of one such layer besides its norms and MLP."""

    layers: int
    parameters: int

    def __post_init__(self) -> None:
        _at_least(self, 1, "layers", "parameters")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer's sizes.

    hidden, layers, heads, kv_heads, head_dim, vocab   as in every configuration
    intermediate          width of the MLP
    max_length            most tokens of a sequence
    tied_embeddings       the output projection is the embedding
    gated_mlp             three matrices (gate, up, down) instead of two
    bias                  which linear layers have one; with "all" norms have one, too
    qk_norm               queries and keys of each head are normed
    gated_attention       attention's output is gated, so queries are projected twice as wide
    learned_positions     rows of a table of position embeddings
    experts, latent       None: one MLP a layer; K and V of `kv_heads` heads are kept
    mixers                None: all layers attend
    kept                  what layers of several kinds keep, with K and V in bf16; empty: all keep K and V of all tokens
    published_parameters  the publisher's count, which a test compares with `parameters`; 0: not known
    dtype                 dtype of the weights if they are published in one of 8 bits; None: any
    codes                 how linear layers are stored if they are published as codes; None: like the rest
    aliases               names that publishers and runs use, as on Hugging Face
    variants              names of models that differ in `max_length` alone, and their `max_length`
    not_modelled          what of the model no figure includes, a sentence each
    source                source of the figures
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_length: int
    tied_embeddings: bool = False
    gated_mlp: bool = True
    bias: Literal["none", "qkv", "all"] = "none"
    qk_norm: bool = False
    gated_attention: bool = False
    learned_positions: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    mixers: Mixers | None = None
    kept: tuple[Layers, ...] = ()
    published_parameters: int = 0
    dtype: Literal["fp8", "int8"] | None = None
    codes: StoredCodes | None = None
    aliases: tuple[str, ...] = ()
    variants: dict[str, int] = {}
    not_modelled: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        sizes = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_length")
        _at_least(self, 1, *sizes)
        _at_least(self, 0, "learned_positions", "published_parameters")
        if self.heads % self.kv_heads:
            raise InvalidConfig(f"kv_heads is {self.kv_heads}; {self.heads} heads cannot share so many evenly")
        if self.experts and self.experts.dense_layers > self.layers:
            raise InvalidConfig(f"dense_layers is {self.experts.dense_layers}; there are only {self.layers} layers")
        num_mixers = self.mixers.layers if self.mixers else 0
        for kind, counted, others in (
            ("states", num_mixers, "mixers"),
            ("K and V", self.layers - num_mixers, "all but mixers"),
        ):
            keeping = sum(each.count for each in self.kept if (each.kind == "state") == (kind == "states"))
            if keeping != counted and (self.kept or self.mixers):
                raise InvalidConfig(
                    f"kept has {keeping} layers with {kind}; {counted} of {self.layers} layers are {others}"
                )

    @property
    def attention_layers(self) -> int:
        """Layers that attend."""
        return self.layers - (self.mixers.layers if self.mixers else 0)

    @property
    def key_dim(self) -> int:
        """Elements of a head's key, and of its query."""
        return self.latent.nope_dim + self.latent.rope_dim if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of a head's value."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def kv_elements(self) -> int:
        """Elements that are kept of a token, over all layers that keep tokens; no state counts."""
        if self.kept:
            return sum(each.count * sum(each.entry) // (BF16 * each.stride) for each in self.kept)
        if self.latent:
            return self.layers * (self.latent.kv_rank + self.latent.rope_dim)
        return self.layers * 2 * self.kv_heads * self.head_dim

    @property
    def kv_elements_of_all_heads(self) -> int:
        """Elements that would be kept of a token if every head had its own K and V."""
        return self.attention_layers * self.heads * (self.key_dim + self.value_dim)

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert of one layer."""
        return self._mlp(self.experts.intermediate) if self.experts else 0

    @property
    def expand_parameters(self) -> int:
        """Parameters of one layer that expand a latent to K (without position) and V of all heads; 0 without latents."""
        latent = self.latent
        return latent.kv_rank * self.heads * (latent.nope_dim + latent.value_dim) if latent else 0

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers without routed experts: those that every token goes through between embedding and output."""
        norms = (2 * self._norm() + 2 * self.head_dim * self.qk_norm) * self.layers
        attention = self._attention() * self.attention_layers
        attention += self.mixers.layers * self.mixers.parameters if self.mixers else 0
        plain = self._mlp(self.intermediate) * (self.layers - self.moe_layers)
        if self.experts is None:
            return norms + attention + plain
        router = self.hidden * self.experts.count
        return norms + attention + plain + (router + self.experts.shared * self.expert_parameters) * self.moe_layers

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, its own or the embedding's."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        embeddings = (self.vocab + self.learned_positions) * self.hidden
        head = 0 if self.tied_embeddings else self.head_parameters
        return embeddings + self.layer_parameters + self.routed_parameters + self._norm() + head

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts."""
        return self.experts.count * self.expert_parameters * self.moe_layers if self.experts else 0

    @property
    def active_parameters(self) -> int:
        """Parameters without the experts that a token is not routed to; embeddings count whole."""
        if self.experts is None:
            return self.parameters
        return self.parameters - self.routed_parameters // self.experts.count * (
            self.experts.count - self.experts.per_token
        )

    @property
    def mlp_width(self) -> int:
        """Most elements, over the layers, between an MLP's matrices for one token."""
        experts = self.experts
        routed = (experts.per_token + experts.shared) * experts.intermediate if experts else 0
        return max(routed, self.intermediate if self.moe_layers < self.layers else 0)

    def _norm(self) -> int:
        return self.hidden * (2 if self.bias == "all" else 1)

    def _attention(self) -> int:
        """Parameters of one layer's attention."""
        if (latent := self.latent) is not None:
            wide = self.heads * self.key_dim
            queries = (self.hidden + wide) * latent.query_rank if latent.query_rank else self.hidden * wide
            kept = self.hidden * (latent.kv_rank + latent.rope_dim)
            norms = latent.query_rank + latent.kv_rank
            return queries + kept + norms + self.expand_parameters + self.heads * self.value_dim * self.hidden
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = {"none": 0, "qkv": queries + 2 * keys, "all": queries + 2 * keys + self.hidden}[self.bias]
        return self.hidden * ((3 if self.gated_attention else 2) * queries + 2 * keys) + biases

    def _mlp(self, width: int) -> int:
        bias = (width * (2 if self.gated_mlp else 1) + self.hidden) if self.bias == "all" else 0
        return (3 if self.gated_mlp else 2) * self.hidden * width + bias


def _at_least(struct: msgspec.Struct, least: int, *fields: str) -> None:
    for field in fields:
        value = getattr(struct, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidConfig(f"{field} is {value!r}; it has to be a whole number of at least {least}")
