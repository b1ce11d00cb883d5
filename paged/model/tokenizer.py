"""The tokenizer of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged.base.words import short_cause
from paged.errors import BrokenCheckpoint


def load_tokenizer(folder: Path) -> Any:
    """Load the Hugging Face tokenizer of a folder; None if there is none. Nothing is downloaded. Raises BrokenCheckpoint."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise BrokenCheckpoint(f"{folder}: the tokenizer cannot be read: {short_cause(error)}") from error
