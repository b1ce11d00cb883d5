"""Projections of a state layer that are computed once for all tokens of a pass, though the layer is called token by token.

Most of a layer's time goes to reading the weights of its first and last linear layers. Their results for a token depend on that token alone, and with
packed weights the bits do not depend on how many tokens there are. So the first linear layers run once, before the calls, which look the results up;
the last one returns its input in each call, and runs once after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paged.model.native.packed import NativeLinear


class Projections:
    """The shared projections of one layer. `run` calls it with these hidden states, and returns its outputs; the calls of linear layers within show
    which can be shared."""

    def __init__(self, module: nn.Module, hidden: Tensor, run: Callable[[], tuple[Tensor, ...]]) -> None:
        calls: list[tuple[nn.Module, Tensor, Tensor]] = []

        def note(linear: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            calls.append((linear, given[0], output.clone()))

        hooks = [each.register_forward_hook(note) for each in module.modules() if isinstance(each, NativeLinear)]
        outputs = run()
        for hook in hooks:
            hook.remove()
        called = [linear for linear, _, _ in calls]
        once = [call for call in calls if called.count(call[0]) == 1]
        self._first = [_Shared(linear) for linear, given, _ in once if _is_same(given, hidden)]
        last = [linear for linear, _, output in once if len(outputs) == 1 and torch.equal(output, outputs[0])]
        self._last = _Shared(last[0]) if last and last[0] not in [each.linear for each in self._first] else None

    def __bool__(self) -> bool:
        """Whether any projection is shared."""
        return bool(self._first or self._last)

    @contextmanager
    def shared(self, hidden: Tensor) -> Iterator[Now]:
        """Share projections of these hidden states, [1, T, width], inside. The caller sets the places of each call in the yielded `Now`."""
        shared = [*self._first, *([self._last] if self._last else [])]
        now = Now()
        for each in self._first:
            each.begin(now, each.forward(hidden))
        if self._last:
            self._last.begin(now, None)
        try:
            yield now
        finally:
            for each in shared:
                each.end()

    def finished(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the layer's outputs for all tokens, given its outputs within `shared`."""
        return (self._last.forward(outputs[0]),) if self._last else outputs


class Now:
    """The next call of a layer: its places, int64 [rows, tokens], and the hidden states there, [rows, tokens, width]."""

    places: Tensor
    hidden: Tensor


class _Shared:
    """A linear layer with a shared projection. Between `begin` and `end` it looks up its results; the last one, without results, returns its input."""

    def __init__(self, linear: Any) -> None:
        self.linear = linear
        self.forward: Callable[[Tensor], Tensor] = linear.forward
        self._now: Now | None = None
        self._found: Tensor | None = None
        linear.forward = self

    def __call__(self, x: Tensor) -> Tensor:
        if self._now is None:
            return self.forward(x)
        if self._found is None:
            return x
        return self._found[0][self._now.places] if _is_same(x, self._now.hidden) else self.forward(x)

    def begin(self, now: Now, found: Tensor | None) -> None:
        self._now, self._found = now, found

    def end(self) -> None:
        self._now = self._found = None


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
