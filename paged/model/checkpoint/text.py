"""The text for training and testing the models that ship: `pydoc`'s topics, and docstrings of the standard library.

It is the documentation of the running Python. Another version has other text, and other held-out paragraphs.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from pathlib import Path
from pydoc_data import topics

SEQUENCE = 192
"""Tokens of a training sequence."""
_HELD_OUT_EVERY = 30
_MODULES = (
    "bisect", "contextlib", "copy", "enum", "functools", "heapq", "random", "shutil", "statistics", "textwrap",
)  # fmt: skip


def documents() -> list[str]:
    """Return every text once, in a fixed order."""
    texts = [text.strip() for _, text in sorted(topics.topics.items())]
    library = Path(sysconfig.get_path("stdlib"))
    for module in _MODULES:
        tree = ast.parse((library / f"{module}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 80:
                    texts.append(text.strip())
    return list(dict.fromkeys(texts))


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return (texts without held-out paragraphs, held-out paragraphs of more than 200 characters). A paragraph's digest decides, so the split is fixed."""
    kept, held_out = [], []
    for text in texts:
        paragraphs = text.split("\n\n")
        is_out = [int(hashlib.sha256(part.encode()).hexdigest(), 16) % _HELD_OUT_EVERY == 0 for part in paragraphs]
        held_out += [part for part, out in zip(paragraphs, is_out, strict=True) if out and len(part) > 200]
        kept.append("\n\n".join(part for part, out in zip(paragraphs, is_out, strict=True) if not out))
    return kept, held_out
