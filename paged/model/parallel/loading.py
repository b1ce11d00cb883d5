"""Loading a rank's part of a checkpoint folder as a model that runs on paged memory; a rank reads no other part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged.base.words import short_cause
from paged.errors import BrokenCheckpoint, UnsupportedModel
from paged.model.hook import ATTENTION, register
from paged.model.loading import DTYPES, LoadedModel, as_loaded, config_of, silenced
from paged.model.parallel.layers import join_ranks
from paged.model.parallel.split import Part, Sizes, config_of_part, slice_of, whole_shape
from paged.model.parallel.sums import Sums
from paged.model.quantised.checkpoints import check_floats
from paged.model.quantised.files import Header, TensorFiles
from paged.model.quantised.reading import renamed
from paged.model.tokenizer import load_tokenizer


class Wanted(NamedTuple):
    """The part to load: of which folder, for which rank, in which dtype, on which device."""

    folder: Path
    part: Part
    dtype: str
    device: torch.device


def load_part(wanted: Wanted, join: Callable[[str], Sums]) -> LoadedModel:
    """Load a part. Once the weights are read, `join` gets their digest, and returns the sums over ranks, by which all ranks make the trial run together.

    The digest is of the configuration, of the headers, sizes and times of modification of the files, before and after reading, and of the weights
    that every rank has whole. Raises CheckpointNotFound, BrokenCheckpoint and UnsupportedModel, and what `join` raises."""
    config = config_of(wanted.folder)
    register()
    with silenced():
        module, digest = _read(config, wanted)
        sums = join(digest)
        join_ranks(module, Sizes.of(config), sums)
        # Only rank 0 uses the tokenizer.
        tokenizer = None if wanted.part.rank else load_tokenizer(wanted.folder)
        return as_loaded(module.to(wanted.device), wanted.folder, tokenizer, wanted.device)


def _read(config: Any, wanted: Wanted) -> tuple[Any, str]:
    """Return the module of a part with its weights, and their digest."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        module = build(config_of_part(config, wanted.part), attn_implementation=ATTENTION).eval()
    module.config.vocab_size = config.vocab_size
    _read_generation_config(module, wanted.folder)
    _compute_buffers(module, wanted.folder)
    dtype = DTYPES.get(wanted.dtype) or (
        torch.float32 if wanted.device.type == "cpu" else config.dtype or torch.float32
    )
    files = TensorFiles(wanted.folder)
    check_floats(files)
    sizes = Sizes.of(config)
    # Other tensors in the files are ignored, as in transformers.
    found = {key: name for name, key, _, joined in renamed(module, files) if joined is None}
    digest = hashlib.sha256((wanted.folder / "config.json").read_bytes())
    _note_files(digest, files)
    for key in sorted(dict(module.named_parameters(remove_duplicate=False))):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if key not in found:
            raise BrokenCheckpoint(f"{wanted.folder}: weights that are missing: {key}.")
        shape = tuple(module.get_parameter(key).shape)
        _check_shape(files.headers[found[key]], key, whole_shape(key, shape, sizes), wanted.folder)
        its = slice_of(key, sizes, wanted.part)
        weight = torch.zeros(shape) if its is None else files.read(found[key], its)
        if its == () and not key.endswith("proj.bias"):
            digest.update(key.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
        _put(module, key, weight.to(dtype))
    _note_files(digest, files)
    if config.tie_word_embeddings:
        module.lm_head.weight = module.model.embed_tokens.weight
    return module, digest.hexdigest()


def _compute_buffers(module: Any, folder: Path) -> None:
    """Compute the buffers of a module that was built without memory. Raises UnsupportedModel for a buffer that is not known here."""
    body = module.model
    body.rotary_emb = type(body.rotary_emb)(module.config)
    scale = getattr(body.embed_tokens, "scalar_embed_scale", None)
    if scale is not None:
        body.embed_tokens.embed_scale = torch.tensor(scale)
    lost = [name for name, each in module.named_buffers() if each.is_meta]
    if lost:
        raise UnsupportedModel(f"{folder}: {lost[0]} is a buffer that is not computed for a split model.")


def _check_shape(header: Header, key: str, wanted: tuple[int, ...], folder: Path) -> None:
    """Raise BrokenCheckpoint if the whole weight has another shape: parts cut from it would be wrong."""
    if header.shape != wanted:
        raise BrokenCheckpoint(
            f"{folder}: weights of another shape: {key} has {list(header.shape)}; {list(wanted)} is wanted."
        )


def _put(module: nn.Module, key: str, weight: Tensor) -> None:
    path, _, name = key.rpartition(".")
    setattr(module.get_submodule(path), name, nn.Parameter(weight, requires_grad=False))


def _note_files(digest: Any, files: TensorFiles) -> None:
    """Add all headers, and each file's size and time of modification, to the digest. Ranks read different parts of a split weight, so these stand in for
    its bytes; ranks are on one machine, and see the same files."""
    for name in files:
        header = files.headers[name]
        digest.update(f"{name} {header.file.name} {header.shape} {header.dtype}\n".encode())
    for file in sorted({each.file for each in files.headers.values()}):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())


def _read_generation_config(module: Any, folder: Path) -> None:
    """Set the module's generation configuration, which has ids that end a sequence. Raises BrokenCheckpoint."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return
    try:
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise BrokenCheckpoint(f"{folder}: generation_config.json cannot be read: {short_cause(error)}") from error
