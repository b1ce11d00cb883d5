"""Small checkpoints in the formats that users have, made by the libraries that write them, for tests/model/test_quantised_checkpoints.py.

    python tools/make_quantised_checkpoints.py compressed      # llm-compressor
    python tools/make_quantised_checkpoints.py gptq awq        # GPTQModel

Run it in an environment of its own that has those libraries, transformers and torch, and not paged. The model is the draft of the embedded one, which
has read Python's documentation, in groups of 32; what it reads here so that errors count where they matter is part of that text. Each
folder gets the versions of what made it, `made_by.json`, and what the library itself makes of the codes: `NAME.expected.safetensors` has each layer's weight
times a fixed vector.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "paged" / "model" / "checkpoint"
sys.path.insert(0, str(SHIPPED))
from text import documents, split  # noqa: E402

OUT = ROOT / "tests" / "model" / "quantised"
GROUP_SIZE = 32
SAMPLES, LENGTH = 32, 192


Made = tuple[list[str], dict[str, Tensor]]
"""The libraries, and {layer: the floats that they make of its codes}."""


def samples() -> list[list[int]]:
    """Token ids of text that the model was trained on."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))
    ids = tokenizer.encode("\n\n".join(split(documents())[0]), add_special_tokens=False)
    step = len(ids) // SAMPLES
    return [ids[at : at + LENGTH] for at in range(0, SAMPLES * step, step)]


def source(*, is_draft: bool = True) -> Path:
    """The draft with the tokenizer in a folder of its own, or the first layer of the embedded model."""
    folder = Path(tempfile.mkdtemp())
    if is_draft:
        shutil.copytree(SHIPPED / "draft", folder, dirs_exist_ok=True)
    else:
        model = AutoModelForCausalLM.from_pretrained(SHIPPED, num_hidden_layers=1, dtype=torch.float16)
        model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder)
    return folder


def compressed(scheme: str, out: Path, **more: Any) -> Made:
    """By llm-compressor: weights of a preset scheme, or of one that is given."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = AutoModelForCausalLM.from_pretrained(source(), dtype=torch.float16)
    kind = more.pop("kind", "plain")
    modifier = (GPTQModifier if kind == "gptq" else QuantizationModifier)(
        ignore=["lm_head"], **({"scheme": scheme} if not more else {"config_groups": {"group_0": more}})
    )
    rows = samples()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    oneshot(model=model, dataset=data, recipe=modifier, max_seq_length=LENGTH, num_calibration_samples=SAMPLES)
    model.save_pretrained(out, save_compressed=True)
    # The library's own reader, which makes floats of them.
    floats = AutoModelForCausalLM.from_pretrained(
        out, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    layers = {path: each.weight for path, each in floats.model.named_modules() if isinstance(each, torch.nn.Linear)}
    return ["llmcompressor", "compressed-tensors"], layers


def by_gptqmodel(out: Path, **settings: Any) -> Made:
    """By GPTQModel."""
    # With 2 cores it makes fewer workers than it then asks for.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    # AWQ wants layers of 64 results and more.
    folder = source(is_draft=settings.get("quant_method") != "awq")
    model = GPTQModel.load(str(folder), QuantizeConfig(group_size=GROUP_SIZE, **settings), device="cpu")
    rows = samples()
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1)
    model.save(str(out))
    read = GPTQModel.load(
        str(out),
        device="cpu",
        # That of its scales.
        dtype=torch.float16,
        backend=BACKEND.GPTQ_TORCH if settings.get("quant_method") != "awq" else BACKEND.AWQ_TORCH,
    )
    with torch.inference_mode():
        layers = {
            path: each(torch.eye(each.in_features, dtype=torch.float16)).T
            for path, each in read.model.model.named_modules()
            if hasattr(each, "qweight")
        }
    return ["gptqmodel"], layers


def weights(bits: int, *, is_symmetric: bool) -> dict[str, Any]:
    """Of compressed-tensors: groups of integers."""
    return {
        "targets": ["Linear"],
        "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": is_symmetric,
            "strategy": "group",
            "group_size": GROUP_SIZE,
        },
    }


MAKERS: dict[str, Callable[[Path], Made]] = {
    "compressed-w4a16": lambda out: compressed("", out, kind="gptq", **weights(4, is_symmetric=True)),
    "compressed-w4a16-zeros": lambda out: compressed("", out, **weights(4, is_symmetric=False)),
    "compressed-w8a8": lambda out: compressed("W8A8", out),
    "gptq": lambda out: by_gptqmodel(out, bits=4, desc_act=False, sym=True),
    "gptq-act-order": lambda out: by_gptqmodel(out, bits=4, desc_act=True, sym=False),
    "gptq-8-bits": lambda out: by_gptqmodel(out, bits=8, desc_act=False, sym=True, format="gptq_v2"),
    "awq": lambda out: by_gptqmodel(out, bits=4, quant_method="awq", format="gemm", sym=False),
}


def finish(name: str, libraries: list[str], layers: dict[str, Tensor]) -> None:
    """Keep what a loader reads, and write what made it. The tokenizer is the shipped one's."""
    folder = OUT / name
    for file in folder.iterdir():
        if file.name != "config.json" and file.suffix != ".safetensors":
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # What the library noted of its run, with places on the machine.
    config["quantization_config"].pop("meta", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    versions = {each: importlib.metadata.version(each) for each in [*libraries, "torch", "transformers"]}
    (folder / "made_by.json").write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")
    products = {
        path: weight.detach().float() @ torch.cos(torch.arange(weight.shape[1])) for path, weight in layers.items()
    }
    save_file(products, folder.parent / f"{name}.expected.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help=f"beginnings of {', '.join(MAKERS)}")
    wanted = parser.parse_args().names
    torch.manual_seed(0)
    for name, make in MAKERS.items():
        if any(name.startswith(each) for each in wanted):
            shutil.rmtree(OUT / name, ignore_errors=True)
            (OUT / name).mkdir(parents=True)
            finish(name, *make(OUT / name))
            print(name, flush=True)
    # Threads of GPTQModel wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
