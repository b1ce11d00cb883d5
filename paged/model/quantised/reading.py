"""Weights of a module of transformers, read from a folder one at a time, renamed and joined as in transformers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn

from paged.base.words import short_cause
from paged.errors import BrokenCheckpoint
from paged.model.quantised.files import TensorFiles
from paged.model.quantised.stored import FLOATS


class ModuleFiles:
    """Float weights in the files by their names in the module. A weight may be joined of several tensors, if these make no other weight."""

    def __init__(self, module: Any, files: TensorFiles) -> None:
        self._module, self._files = module, files
        # By weight, the names in the files of its parts with the pattern that each matched, and the converter that joins them.
        self._parts: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        self._joins: dict[str, Any] = {}
        for name, key, pattern, join in renamed(module, files):
            self._parts[key].append((name, pattern))
            if join is not None:
                self._joins[key] = join

    def has(self, key: str, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this name and shape can be read."""
        headers = [self._files.headers[name] for name, _ in self._parts.get(key, ())]
        join = self._joins.get(key)
        if not headers or any(header.dtype not in FLOATS for header in headers):
            return False
        if join is None:
            return len(headers) == 1 and headers[0].shape == shape
        return len(join.target_patterns) == 1 and sum(prod(header.shape) for header in headers) == prod(shape)

    def read(self, key: str) -> Tensor:
        """Read a weight, in its stored dtype. Raises BrokenCheckpoint."""
        parts, join = self._parts[key], self._joins.get(key)
        if join is None:
            return self._files.read(parts[0][0])
        join = deepcopy(join)
        for name, pattern in parts:
            join.add_tensor(key, name, pattern, partial(self._files.read, name))
        try:
            found = join.convert(key, model=self._module, config=self._module.config)[key]
        except BrokenCheckpoint:
            raise
        except Exception as error:
            raise BrokenCheckpoint(
                f"{self._files.folder}: {key} cannot be made of its parts: {short_cause(error)}"
            ) from error
        weight: Tensor = found[0] if isinstance(found, list) else found
        wanted = self._module.get_parameter(key).shape
        if weight.shape != wanted:
            raise BrokenCheckpoint(
                f"{self._files.folder}: {key} has the shape {list(weight.shape)} when its parts are joined; {list(wanted)} is wanted."
            )
        return weight


def renamed(module: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, str, str | None, Any]]:
    """Yield for each name in the files, in transformers' order: the name; the name in the module of the weight that it is, or is part of; and for a part the
    pattern that it matched, and the converter that joins parts, else None twice."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions: Any = get_model_conversion_mapping(module)  # type: ignore[arg-type]
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    joins = {pattern: each for each in converters for pattern in each.source_patterns}
    there, prefix = module.state_dict(), getattr(module, "base_model_prefix", None)
    for name in sorted(names, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, there)
        yield name, key, pattern, None if pattern is None else joins[pattern]
