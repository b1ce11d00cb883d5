"""The small language model that ships with the package, in the ordinary Hugging Face layout.

A Llama of 0.9 million parameters that has read Python's own documentation (`tools/train_checkpoint.py` made it, `training.json` says
how, and how well it does on text that it never saw). It is for demonstrations and tests. Knows where it lies, nothing else.
"""

from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def checkpoint_path() -> Path:
    """The folder: config.json, model.safetensors, tokenizer."""
    return Path(__file__).parent


def named_or_shipped(model: T | None) -> T | Path:
    """The model that was named, or the folder of this one."""
    return checkpoint_path() if model is None else model
