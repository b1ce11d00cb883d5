"""Train the small language models that ship in the package, from text that every Python has.

    python tools/train_checkpoint.py paged/model/checkpoint --steps 3000
    python tools/train_checkpoint.py paged/model/checkpoint/draft --steps 3000 --draft-of paged/model/checkpoint
    python tools/train_checkpoint.py paged/model/checkpoint/hybrid --steps 1700 --hybrid-of paged/model/checkpoint

The text is `pydoc`'s topics and the docstrings of some modules of the standard library; one paragraph in thirty is held out and
never trained on. Half of the windows begin where a paragraph does, as prompts do, and half are of a copy of the text without
quotation marks around words, as people type. The model is a Llama of 0.9 million parameters with a byte-level BPE of 1,024 tokens, in the ordinary Hugging
Face layout, weights in float16. It is small enough to learn much of its text by heart, which is what a demonstration wants: the
held-out loss beside the training loss says so. The second one, of a quarter of the parameters and trained likewise on the same tokens, guesses
what the first one says. The third one is an LFM2: two of its four layers are short convolutions, which keep a state of two tokens in the place
of K and V of all. It begins with the first one's weights wherever it has the same ones, and is trained a few minutes more.

Needs the `engine` extra. Two cores take about half an hour for the first one, and one core 5 minutes for the third. Where other work runs
beside it, threads that wait by spinning take most of the time: `OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1` is faster then.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import sys
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paged.model.checkpoint.text import SEQUENCE, documents, split

VOCABULARY = 1024
CONTEXT = 1024
END = "<|end|>"
BATCH = 32
WARM_UP = 100
PEAK_RATE = 3e-3


def trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A break between paragraphs is one token wherever it stands, so that a text is encoded as its paragraphs are, one by one.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n\n", "isolated"), tokenizer.pre_tokenizer]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, model_max_length=CONTEXT, clean_up_tokenization_spaces=False
    )


def stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> tuple[torch.Tensor, list[int]]:
    """All texts as one row of ids, each followed by the end token, and where paragraphs begin in it."""
    ids: list[int] = []
    starts: list[int] = []
    for text in texts:
        paragraphs = text.split("\n\n")
        for i, paragraph in enumerate(paragraphs):
            if paragraph[:1].isalpha() or paragraph[:1] in '"“':
                starts.append(len(ids))
            ids += tokenizer.encode(
                paragraph + ("\n\n" if i + 1 < len(paragraphs) else ""), add_special_tokens=False, verbose=False
            )
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids), [start for start in starts if start < len(ids) - SEQUENCE - 1]


def without_quotes(text: str) -> str:
    """The text as it is typed without marks for words of the language."""
    return re.sub(r"[\"“”`]", "", text)


def windows(streams: list[tuple[torch.Tensor, list[int]]], batch: int) -> torch.Tensor:
    """int64 [batch, SEQUENCE]: half of them anywhere, half at the beginning of a paragraph."""
    picked = []
    for i in range(batch):
        ids, starts = streams[int(torch.randint(len(streams), ()))]
        anywhere = int(torch.randint(0, len(ids) - SEQUENCE - 1, ()))
        start = anywhere if i % 2 else starts[int(torch.randint(len(starts), ()))]
        picked.append(ids[start : start + SEQUENCE])
    return torch.stack(picked)


WHOLE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DRAFT = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def fresh_model(shape: dict[str, int]) -> LlamaForCausalLM:
    config = LlamaConfig(
        **shape,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        attention_bias=False,
    )
    return LlamaForCausalLM(config)


HYBRID_LAYERS = ["conv", "full_attention", "conv", "full_attention"]
HYBRID_BATCH = 8
_SAME_WEIGHTS = {
    "self_attn.out_proj": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
}


def hybrid_of(folder: Path) -> Lfm2ForCausalLM:
    """A model with short convolutions in the place of two layers' attention, and the weights of `folder` wherever it has the same ones."""
    whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = Lfm2Config(
        **WHOLE,
        layer_types=HYBRID_LAYERS,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        rope_parameters=dict(whole.config.rope_parameters),
        norm_eps=whole.config.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=0,
    )
    model, known = Lfm2ForCausalLM(config), whole.state_dict()
    for name, weight in model.state_dict().items():
        for ours, theirs in _SAME_WEIGHTS.items():
            name = name.replace(ours, theirs)
        if name in known:
            weight.copy_(known[name])
    return model


@torch.no_grad()
def loss_on(model: LlamaForCausalLM | Lfm2ForCausalLM, ids: torch.Tensor, most: int = 64) -> float:
    """Mean loss over the stream's first windows, nats a token."""
    windows = ids[: len(ids) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    step = max(1, len(windows) // most)
    picked = windows[::step][:most]
    return float(model(input_ids=picked, labels=picked).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--draft-of", type=Path, help="a checkpoint whose tokens it speaks, and for which it is to guess"
    )
    parser.add_argument(
        "--hybrid-of", type=Path, help="a checkpoint whose tokens it speaks, and with whose weights it begins"
    )
    args = parser.parse_args()
    known_tokens = args.draft_of or args.hybrid_of
    torch.manual_seed(args.seed)
    kept, held_out = split(documents())
    if known_tokens is None:
        tokenizer = trained_tokenizer(kept)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(known_tokens)
    plain = stream(tokenizer, [without_quotes(text) for text in kept])
    (train, starts), (test, _) = stream(tokenizer, kept), stream(tokenizer, held_out)
    if args.hybrid_of is None:
        model, batch = fresh_model(WHOLE if args.draft_of is None else DRAFT), BATCH
    else:
        model, batch = hybrid_of(args.hybrid_of), HYBRID_BATCH
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(train):,} tokens to train on, {len(test):,} held out, {num_parameters:,} parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, step / WARM_UP) * (0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, step / args.steps))) / 2)
        ),
    )
    began, recent = time.monotonic(), 0.0
    for step in range(1, args.steps + 1):
        window = windows([(train, starts), plain], batch)
        loss = model(input_ids=window, labels=window).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        recent = loss.item() if step == 1 else 0.98 * recent + 0.02 * loss.item()
        if step % 50 == 0:
            print(f"step {step:5}  loss {recent:.3f}  {time.monotonic() - began:.0f} s", flush=True)
    model = model.half().float().eval()
    report = {
        "parameters": num_parameters,
        "training_tokens": len(train),
        "held_out_tokens": len(test),
        "training_loss": round(loss_on(model, train), 3),
        "held_out_loss": round(loss_on(model, test), 3),
        **({} if args.hybrid_of is None else {"begins_with": str(args.hybrid_of)}),
        "steps": args.steps,
        "batch": [batch, SEQUENCE],
        "seed": args.seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "text": "pydoc topics and docstrings of the standard library, (c) Python Software Foundation, PSF License Version 2",
    }
    model.generation_config.bos_token_id = None
    model.half().save_pretrained(args.out)
    if args.draft_of is None:  # A draft model is never asked for text.
        tokenizer.save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    sys.exit(main())
