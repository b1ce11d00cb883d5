"""Projections of a state layer that are computed once for all tokens of a pass, though the layer is called token by token.

Most of a layer's time goes to reading the weights of its first and last linear layers. What the first ones make of the hidden states, and what the last one
makes of its input, depends on one token alone; and packed weights give each token the same bits, however many there are. So while a layer is called
token by token the first ones look their results up, and the last one returns what it gets, to be multiplied when all tokens are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paged.model.native.packed import NativeLinear


class Projections:
    """Those of one layer. `run` is a call of it with these hidden states, which returns its outputs: what it does shows which they are."""

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
        """Whether there are any."""
        return bool(self._first or self._last)

    @contextmanager
    def shared(self, hidden: Tensor) -> Iterator[Now]:
        """Within it the layer is called for places of these hidden states, [1, T, width], that are said before each call."""
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
        """What the layer returns of all tokens, given what it returned within `shared`."""
        return (self._last.forward(outputs[0]),) if self._last else outputs


class Now:
    """What a layer is called for next: places, int64 [rows, tokens], and the hidden states there, [rows, tokens, width]."""

    places: Tensor
    hidden: Tensor


class _Shared:
    """A linear layer that looks up what it made of the hidden states of all tokens; the last one returns what it gets."""

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
