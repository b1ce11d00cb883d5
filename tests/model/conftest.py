"""What the tests of models share: tiny checkpoints with random weights, and worlds in which their memory is short.

Torch runs on one thread, since matrices this small are not worth two; transformers says nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paged import Request, Retention

if find_spec("torch") is None or find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from paged.model.loading import LoadedModel, load_model, silenced
    from paged.testing.engine_world import EngineWorld

VOCABULARY, FIRST_WORD = 97, 3
MAX_LENGTH = 128
# Smaller than most prompts, and no multiple of a block.
WINDOW = 7

_SPECIAL = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDE = {"hidden_size": 48, "num_attention_heads": 4, "max_position_embeddings": MAX_LENGTH}
_DECODER = {**_SPECIAL, **_WIDE, "num_hidden_layers": 2}
_WITH_MLP = {**_DECODER, "intermediate_size": 80}
_GROUPED = {**_WITH_MLP, "num_key_value_heads": 2}
_WINDOWED = {"head_dim": 16, "sliding_window": WINDOW}
# Untied: with Gemma's large embeddings, random text that is tied to them repeats its last word for ever.
_GEMMA = {**_GROUPED, "head_dim": 16, "tie_word_embeddings": False}
# Far from what would do nothing.
_CAPS = {"query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0}
_GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 80, "n_positions": MAX_LENGTH}

_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
_SHARING = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
_PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]
_OF_SEVERAL_KINDS: dict[str, dict[str, Any]] = {
    "cohere2": {
        **_GROUPED,
        **_WINDOWED,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "deepseek_v3": {**_WITH_MLP, **_LATENT, **_EXPERTS, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "gemma3_text": {**_GEMMA, **_WINDOWED, "num_hidden_layers": 3, "layer_types": _PATTERN},
    "gemma3n_text": {
        **_GEMMA, **_WINDOWED, **_SHARING, "layer_types": _PATTERN * 2, "intermediate_size": [80] * 6,
        "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {
        **_GEMMA, **_WINDOWED, **_SHARING, "layer_types": _PATTERN * 2, "global_head_dim": 24,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "llama4_text": {
        **_GEMMA, "num_hidden_layers": 4, "intermediate_size_mlp": 80, "num_local_experts": 2,
        "attention_chunk_size": 8, "floor_scale": 6, "no_rope_layers": [1, 1, 0, 1],
    },
    "mimo_v2_flash": {
        **_GROUPED, **_EXPERTS, **_WINDOWED, "num_hidden_layers": 3, "layer_types": _PATTERN, "v_head_dim": 8,
        "num_key_value_heads": 1,
    },
}  # fmt: skip

_FOUR = {**_GROUPED, "head_dim": 16, "num_hidden_layers": 4}
_MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_IN_TURN = ["linear_attention", "full_attention"] * 2
_WITH_STATES: dict[str, dict[str, Any]] = {
    "falcon_h1": {**_FOUR, **_MAMBA_2, "mamba_d_ssm": 96},
    "jamba": {**_FOUR, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "num_experts": 4},
    "lfm2": {**_FOUR, "full_attn_idxs": [1, 3]},
    "mamba2": {
        **_SPECIAL, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 16, "num_heads": 8, "head_dim": 12,
        "n_groups": 2, "chunk_size": 8,
    },
    "minimax": {**_FOUR, "layer_types": _IN_TURN, "block_size": 8},
    "qwen3_next": {
        **_FOUR, **_DELTA, "layer_types": _IN_TURN, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
    "recurrent_gemma": {
        **_DECODER, "num_hidden_layers": 4, "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"], "intermediate_size": 96,
    },
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 16},
    "mistral": {**_GROUPED, "sliding_window": WINDOW},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, **_WINDOWED, **_CAPS},
    "phi": _GROUPED,
    "gpt2": {**_SPECIAL, **_GPT2, "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": _WITH_MLP,
    # Layers with a window and layers without take turns, and every head has a sink.
    "gpt_oss": {**_GROUPED, **_WINDOWED, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "dbrx": {
        **_SPECIAL,
        "d_model": 48,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": MAX_LENGTH,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "opt": {**_DECODER, "ffn_dim": 80, "word_embed_proj_dim": 48},
    **_OF_SEVERAL_KINDS,
    **_WITH_STATES,
    # Those that are refused.
    "bert": _WITH_MLP,
    "bloom": {**_SPECIAL, "hidden_size": 48, "n_layer": 2, "n_head": 4},
    "falcon": _DECODER,
}


@pytest.fixture(scope="module", autouse=True)
def _quiet_and_on_one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with silenced():
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """saved(config, spread, seed=0): a folder with a model of random weights, large enough that greedy text wanders."""

    def save(config: Any, spread: float, seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type)
        with torch.random.fork_rng(), silenced(), torch.no_grad():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config).float()
            for path, weights in model.named_parameters():
                if weights.dim() >= 2:
                    weights.normal_(0, spread)
                elif path.endswith(".sinks"):
                    weights.normal_(0, 2)
            model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def checkpoint(saved: Callable[..., Path]) -> Callable[..., Path]:
    """checkpoint(architecture, **changes): such a folder, `changes` being made to its configuration. It is shared: copy it before you
    harm it."""
    made: dict[str, Path] = {}

    def make(architecture: str, **changes: Any) -> Path:
        name = "-".join([architecture, *(f"{key}={value}" for key, value in sorted(changes.items()))])
        if name not in made:
            made[name] = saved(AutoConfig.for_model(architecture, **{**CONFIGS[architecture], **changes}), 0.3)
        return made[name]

    return make


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[..., Path]) -> Callable[..., LoadedModel]:
    """loaded(architecture, **changes): that checkpoint as a LoadedModel, loaded once."""
    found: dict[Path, LoadedModel] = {}

    def load(architecture: str, **changes: Any) -> LoadedModel:
        folder = checkpoint(architecture, **changes)
        if folder not in found:
            found[folder] = load_model(folder)
        return found[folder]

    return load


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[list[int]]]:
    """generate(folder, prompts, most): what transformers writes after each prompt, greedily, so many tokens."""

    def texts(folder: Path, prompts: list[list[int]], most: list[int]) -> list[list[int]]:
        # Its own attention written out: under some versions Gemma 2 chooses another one by itself, which knows no soft cap.
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        model.generation_config.eos_token_id = None
        greedy, found = {"do_sample": False}, []
        for prompt, max_tokens in zip(prompts, most, strict=True):
            ids, seen = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.int64)
            written = model.generate(ids, attention_mask=seen, max_new_tokens=max_tokens, **greedy)
            found.append(written[0, len(prompt) :].tolist())
        return found

    return texts


@dataclass(frozen=True)
class World:
    """Requests, and conditions under which there is not room for all of them."""

    conditions: EngineWorld
    requests: tuple[Request, ...]


def _draw_world(chance: random.Random) -> World:
    """Requests that share prefixes, most of them cut near a block's end, and grow into each other's memory."""
    block_size = chance.choice([1, 2, 3, 4, 4, 5, 8, 8, 16, 32, 64, chance.randint(1, 64)])
    most_blocks = 6 if block_size <= 4 else 3 if block_size <= 16 else 1
    texts = [[chance.randrange(FIRST_WORD, VOCABULARY) for _ in range(80)] for _ in range(2)]
    requests: list[Request] = []
    for number in range(chance.randint(4, 6)):
        length = block_size * chance.randint(1, most_blocks) + chance.choice([-1, -1, 0, 0, 1, 2, -(block_size // 2)])
        tail = [chance.randrange(FIRST_WORD, VOCABULARY) for _ in range(chance.choice([0, 0, 1, 2]))]
        shared = chance.choice(texts)[: max(1, length - len(tail))]
        if number > 3 and chance.random() < 0.8:
            # One that was here before comes back, when others have pushed out what it left.
            shared, tail = list(requests[number - 4].prompt), tail[:1]
        wishes: dict[str, Any] = {
            "max_tokens": chance.choice([2, 6, 10, 14]),
            "priority": chance.choice([0, 0, 0, 1]),
            "reads_cache": chance.random() < 0.9,
            "writes_cache": chance.random() < 0.9,
        }
        kept = Retention(priority=chance.randint(1, 3), lasts=chance.choice([None, 5.0]))
        wishes["retention"] = chance.choice([None, None, kept])
        requests.append(Request(id=str(number), prompt=shared + tail, **wishes))
    largest = max(-(-(len(request.prompt) + request.max_tokens) // block_size) for request in requests)
    conditions = EngineWorld(
        num_blocks=largest + chance.choice([0, 0, 1]),
        block_size=block_size,
        host_blocks=chance.choice([0, 2, 2 * largest, 4 * largest]),
        host_caching=chance.random() < 0.7,
        policy=chance.choice(["paged", "paged", "paged", "vllm", "fastgen"]),
        max_tokens_per_step=chance.choice([7, 16, 40, 100]),
        max_sequences=chance.choice([3, 6, 8]),
        max_chunk=chance.choice([None, 64, chance.randint(1, 64)]),
        backend=chance.choice(["reference", "torch_gather", "native"]),
    )
    return World(conditions, tuple(requests))


@pytest.fixture(scope="session")
def draw_world() -> Callable[[random.Random], World]:
    """Draws a World from a source of chance, seeded or Hypothesis's."""
    return _draw_world
