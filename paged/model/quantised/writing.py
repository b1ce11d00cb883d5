"""Writing a checkpoint of floats again, with its linear layers in codes, as compressed-tensors stores them.

Layers are read, quantised and written one after the other; one shard of output is in memory. The folder gets its name once it is complete.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paged.base.words import short_cause
from paged.errors import InvalidConfig, UnsupportedModel, UnwritablePath
from paged.model.checkpoint import named_or_shipped
from paged.model.loading import config_of, silenced
from paged.model.quantised.checkpoints import settings_of
from paged.model.quantised.compressed import METHOD, PACKED
from paged.model.quantised.files import INDEX, TensorFiles
from paged.model.quantised.names import BITS, GROUPS
from paged.model.quantised.placing import is_of_layer, linears_of, paths_of
from paged.model.quantised.stored import FLOATS, Stored
from paged.model.quantised.weights import quantise
from paged.model.tokenizer import load_tokenizer

GROUP_SIZES = (32, 64, 128)
_SHARD_BYTES = 2 * 10**9
# Suffixes of files that are copied besides weights and configuration.
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")


@dataclass(frozen=True)
class LayerError:
    """The size of a layer before and after, and the error of its codes."""

    name: str
    bytes_before: int
    bytes_after: int
    error: float
    """‖codes as floats − floats‖ ÷ ‖floats‖."""


@dataclass(frozen=True)
class Written:
    """The result of writing: the bytes of all tensors before and after, and each layer's error."""

    folder: Path
    bytes_before: int
    bytes_after: int
    bytes_not_linear: int
    """Bytes of decoder layers that stay floats, since they belong to no linear layer: norms, experts and so on."""
    layers: list[LayerError]


@dataclass
class _Shards:
    """Writes tensors into the files of a folder, which gets the name `out` later."""

    folder: Path
    out: Path
    num_bytes: int = 0
    _held: dict[str, Tensor] = field(default_factory=dict)
    _held_bytes: int = 0
    _placed: list[list[str]] = field(default_factory=list)

    def add(self, tensors: dict[str, Tensor]) -> int:
        """Add tensors, and write a shard if it is full. Return their bytes."""
        more = sum(each.nbytes for each in tensors.values())
        if self._held and self._held_bytes + more > _SHARD_BYTES:
            self._flush()
        self._held.update(tensors)
        self._held_bytes += more
        self.num_bytes += more
        return more

    def close(self) -> None:
        """Write the last shard, name the files, and write an index if there are several."""
        self._flush()
        count = len(self._placed)
        names = [
            "model.safetensors" if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)
        ]
        placed = {tensor: name for name, tensors in zip(names, self._placed, strict=True) for tensor in tensors}
        with _writing(self.out):
            for i, name in enumerate(names):
                self._part(i).rename(self.folder / name)
            if count > 1:
                _write(self.folder / INDEX, {"metadata": {"total_size": self.num_bytes}, "weight_map": placed})

    def _flush(self) -> None:
        with _writing(self.out):
            save_file(self._held, self._part(len(self._placed)), metadata={"format": "pt"})
        self._placed.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}"


def write_quantised(
    model: str | Path,
    out: Path,
    *,
    weights: str,
    group_size: int | None = None,
    on_layer: Callable[[LayerError, int], None] = lambda layer, of: None,
) -> Written:
    """Write a folder `out` with the linear layers of a checkpoint's decoder layers as codes, and everything else as it is. A failed call leaves nothing.

    weights     "int8" or "int4"
    group_size  32, 64 or 128 inputs that share a scale; None: for int8 one scale a result, for int4 groups of 32
    on_layer    called after each layer with its error and the number of layers

    Raises InvalidConfig for an `out` that exists, groups that do not divide, and weights that are NaN or infinite; BrokenCheckpoint for a linear layer
    that is missing, of another shape or no floats; UnwritablePath, for a full disk, too; and what `load_model` raises.
    """
    check_target(out, weights, group_size)
    bits, group_size = BITS[weights], group_size or GROUPS[weights]
    folder = Path(named_or_shipped(model))
    with silenced():
        config = config_of(folder)
        found = settings_of(config)
        if found is not None:
            raise UnsupportedModel(
                f"{folder}: its weights are quantised ({found.get('quant_method')}); a checkpoint of floats is needed."
            )
        files = TensorFiles(folder)
        layers, floats = _layers(config, files)
        load_tokenizer(folder)
    for name in sorted(layers):
        depth = files.headers[f"{name}.weight"].shape[1]
        if depth % (group_size or depth):
            raise InvalidConfig(f"{folder}: {name}: groups of {group_size} do not divide its {depth:,} inputs.")
    with _made_whole(out) as made:
        shards, errors = _Shards(made, out), []
        for name in files:
            layer = name.removesuffix(".weight")
            if layer not in layers:
                shards.add({name: files.read(name)})
                continue
            weight = files.read(name)
            stored, error = _stored(weight, bits, group_size, name)
            after = shards.add({f"{layer}.{part}": tensor for part, tensor in stored.items()})
            errors.append(LayerError(layer, weight.nbytes, after, error))
            on_layer(errors[-1], len(layers))
        shards.close()
        with _writing(out):
            _write_rest(folder, made, _settings(bits, group_size, floats))
    sizes = {name: header.num_bytes for name, header in files.headers.items()}
    others = {name for name in sizes if is_of_layer(name) and name.rpartition(".")[0] not in layers}
    return Written(out, sum(sizes.values()), shards.num_bytes, sum(sizes[name] for name in others), errors)


def check_target(out: Path, weights: str, group_size: int | None) -> None:
    """Raise InvalidConfig for invalid arguments of `write_quantised`, before a checkpoint is read."""
    if weights not in BITS:
        raise InvalidConfig(f"weights are quantised to {' or '.join(BITS)}; got {weights!r}.")
    if group_size is not None and group_size not in GROUP_SIZES:
        raise InvalidConfig(f"a group has {', '.join(map(str, GROUP_SIZES))} inputs; got {group_size}.")
    if out.exists():
        raise InvalidConfig(f"{out} is there already; name a folder to be made.")
    if not out.parent.is_dir():
        raise InvalidConfig(f"{out.parent}: no such folder to make {out.name} in.")


def _layers(config: Any, files: TensorFiles) -> tuple[set[str], list[str]]:
    """Return the names in the files of linear layers to quantise, and of those that stay floats. Raises UnsupportedModel if there are none to quantise, and
    BrokenCheckpoint for one that is missing, of another shape than the module has, or no floats."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        module = build(config)
    linears, layers, floats = linears_of(module), set(), []
    paths = paths_of(module, [name.removesuffix(".weight") for name in files if name.endswith(".weight")])
    names = {path: name for name, (path, is_part) in paths.items() if not is_part}
    may_miss = _may_miss(module, {path for path, is_part in paths.values() if is_part})
    for path, linear in linears.items():
        name = names.get(path, path)
        if path not in names and may_miss(path):
            continue
        Stored(files, name).expect("weight", tuple(linear.weight.shape), FLOATS)
        if is_of_layer(path):
            layers.add(name)
        else:
            floats.append(name)
    if not layers:
        raise UnsupportedModel(f"{files.folder}: its layers have no linear layers of their own to be quantised.")
    # Named even if it is tied to embeddings, and so not in the files.
    return layers, sorted({*floats, "lm_head"})


def _may_miss(module: Any, joined: set[str]) -> Callable[[str], bool]:
    """Return a function: whether the files may lack a linear layer's weight, since it is tied, since transformers makes it of other tensors (`joined` has
    the first layer that it makes of each), or since transformers allows it to be missing."""
    tied = module.all_tied_weights_keys
    patterns = module._keys_to_ignore_on_load_missing or ()
    owners = {path.rpartition(".")[0] for path in joined}

    def may_miss(path: str) -> bool:
        weight = f"{path}.weight"
        is_tied_or_made = weight in tied or path.rpartition(".")[0] in owners
        return is_tied_or_made or any(re.search(each, weight) for each in patterns)

    return may_miss


def _stored(weight: Tensor, bits: int, group_size: int | None, name: str) -> tuple[dict[str, Tensor], float]:
    """Return a layer's tensors in the format pack-quantized, and its error."""
    try:
        found = quantise(weight, bits=bits, group_size=group_size, scale_dtype=weight.dtype)
    except InvalidConfig as error:
        raise InvalidConfig(f"{name}: {error}") from None
    off = torch.linalg.vector_norm(found.dequantised() - weight.float())
    size = torch.linalg.vector_norm(weight.float())
    # A group of zeros may have any scale but 0.
    scales = torch.where(found.scales == 0, 1, found.scales)
    parts = {
        "weight_packed": packed(found.codes, bits),
        "weight_scale": scales.to(weight.dtype),
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, float(off / size) if size else 0.0


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes, uint8 [rows, columns], in words, int32 [rows, words]: consecutive columns, the first in the lowest bits; the last word is padded."""
    each = 32 // bits
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -columns % each)).view(rows, -1, each).to(torch.int64)
    words = (padded << torch.arange(each) * bits).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _settings(bits: int, group_size: int | None, floats: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": PACKED}},
        "ignore": floats,
        "kv_cache_scheme": None,
    }


def _write_rest(folder: Path, made: Path, settings: dict[str, Any]) -> None:
    """Write the configuration, and copy the other files of the folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _write(made / "config.json", {**config, "quantization_config": settings})
    for file in folder.iterdir():
        is_index = file.name.endswith(".index.json")
        if file.is_file() and file.suffix in _COPIED and not is_index and file.name != "config.json":
            shutil.copyfile(file, made / file.name)


def _write(file: Path, document: dict[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn errors of writing, the system's or those of safetensors, into UnwritablePath."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UnwritablePath(out, short_cause(error)) from error


@contextmanager
def _made_whole(out: Path) -> Iterator[Path]:
    """Make a folder beside `out`. It gets the name `out` at the end of the block, or is removed if anything fails."""
    made = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
    with _writing(out):
        made.mkdir()
    try:
        yield made
        # safetensors' files are for their owner alone; here they get the mode of the folder, which follows the umask.
        with _writing(out):
            for file in made.iterdir():
                file.chmod(made.stat().st_mode & 0o666)
            made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
