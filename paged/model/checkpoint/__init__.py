"""The small language model that ships with the package, in the ordinary Hugging Face layout, and a smaller one that guesses what it says.

A Llama of 0.9 million parameters that has read Python's own documentation, and one of a quarter of them
(`tools/train_checkpoint.py` made both, `training.json` says how, and how well each does on text that it never saw).
They are for demonstrations and tests.
"""

from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def checkpoint_path() -> Path:
    """The folder: config.json, model.safetensors, tokenizer."""
    return Path(__file__).parent


def draft_path() -> Path:
    """The folder of the smaller one, which has no tokenizer of its own."""
    return checkpoint_path() / "draft"


def named_or_shipped(model: T | None) -> T | Path:
    """The model that was named, or the folder of this one."""
    return checkpoint_path() if model is None else model
