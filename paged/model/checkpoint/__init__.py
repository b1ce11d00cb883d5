"""The small language models that ship with the package, in the ordinary Hugging Face layout.

Three that have read Python's own documentation: `embedded`, a Llama of 0.9 million parameters; one of a quarter of them, which guesses what it
says; and `hybrid`, an LFM2 of 0.95 million in two of whose four layers a short convolution keeps a state in the place of K and V
(`tools/train_checkpoint.py` made all, `training.json` says how, and how well each does on text that it never saw).
They are for demonstrations and tests.
"""

from pathlib import Path
from typing import TypeVar

from paged.errors import CheckpointNotFound

T = TypeVar("T")

EMBEDDED, HYBRID = "embedded", "hybrid"
NAMES = (EMBEDDED, HYBRID)
"""The names of models that ship."""


def checkpoint_path() -> Path:
    """The folder of the embedded one: config.json, model.safetensors, tokenizer."""
    return Path(__file__).parent


def draft_path() -> Path:
    """The folder of the smaller one, which has no tokenizer of its own."""
    return checkpoint_path() / "draft"


def hybrid_path() -> Path:
    """The folder of the one whose layers are of two kinds; its tokenizer is the embedded one's."""
    return checkpoint_path() / "hybrid"


def named_or_shipped(model: T | None) -> T | Path:
    """The model that was named, or the folder of one that ships: of `embedded` for None. A folder of the same name is `./hybrid`."""
    if model is None or model == EMBEDDED:
        return checkpoint_path()
    return hybrid_path() if model == HYBRID else model


def check_folder(folder: Path) -> None:
    """Raise CheckpointNotFound unless the folder has a configuration and weights. Needs no library."""
    if not folder.is_dir():
        raise CheckpointNotFound(
            f"{folder}: no such folder. A folder in the Hugging Face layout is needed (config.json, .safetensors, a tokenizer), or the name of "
            f"a model that ships, {' or '.join(NAMES)}; nothing is fetched by name."
        )
    if not (folder / "config.json").is_file():
        raise CheckpointNotFound(f"{folder}: no config.json; a folder in the Hugging Face layout is needed.")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointNotFound(f"{folder}: no .safetensors file; other formats of weights are not read.")


def is_shipped(path: Path) -> bool:
    """Whether it is the folder of a model that ships under a name."""
    return path in (checkpoint_path(), hybrid_path())
