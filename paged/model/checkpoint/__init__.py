"""The small language models that ship with the package, in the ordinary Hugging Face layout.

All were trained on Python's documentation, and are for demonstrations and tests:

    embedded    a Llama of 0.9 million parameters
    its draft   a Llama of a quarter of these
    hybrid      an LFM2 of 0.95 million; in two of its four layers a short convolution keeps a state in place of K and V

`tools/train_checkpoint.py` made them; `training.json` has the settings, and the losses on held-out text.
"""

from pathlib import Path
from typing import TypeVar

from paged.errors import CheckpointNotFound

T = TypeVar("T")

EMBEDDED, HYBRID = "embedded", "hybrid"
NAMES = (EMBEDDED, HYBRID)
"""The names of models that ship."""


def checkpoint_path() -> Path:
    """Return the folder of `embedded`: config.json, model.safetensors, tokenizer."""
    return Path(__file__).parent


def draft_path() -> Path:
    """Return the folder of the draft model, which has no tokenizer of its own."""
    return checkpoint_path() / "draft"


def hybrid_path() -> Path:
    """Return the folder of `hybrid`; its tokenizer is that of `embedded`."""
    return checkpoint_path() / "hybrid"


def named_or_shipped(model: T | None) -> T | Path:
    """Return the folder of the named model that ships, `embedded` for None; any other value as it is. A folder called hybrid is named `./hybrid`."""
    if model is None or model == EMBEDDED:
        return checkpoint_path()
    return hybrid_path() if model == HYBRID else model


def check_folder(folder: Path) -> None:
    """Raise CheckpointNotFound unless the folder has a configuration and weights. Works without torch and transformers."""
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
    """Whether this is the folder of `embedded` or `hybrid`."""
    return path in (checkpoint_path(), hybrid_path())
