"""The content of a manager's cache, read once between two calls, and the manager's own spelling of namespaces."""

from __future__ import annotations

from typing import Any

from paged.testing.content import typed


class CacheView:
    """The contents of both tiers, and the bytes that stand for a request's namespace in them."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._seen: dict[str, set[Any]] = {}
        self._roots: dict[object, bytes] = {}
        self._namespaces: dict[bytes, object] = {}

    def forget(self) -> None:
        """Ask the manager again: a call may have changed its content."""
        self._seen.clear()

    def contents(self, tier: str = "device") -> set[Any]:
        """`cached_contents` of the manager; not to be changed."""
        if tier not in self._seen:
            self._seen[tier] = self._manager.cached_contents(*([tier] if tier == "host" else []))
        return self._seen[tier]

    def root(self, namespace: object) -> bytes:
        """The first part of all content of a namespace, learned from a manager of the same class with one block."""
        # 1 == True for Python's dictionaries; for a cache they are two tenants.
        key = typed(namespace)
        if key not in self._roots:
            probe = type(self._manager)(1, 1)
            row = probe.add([0], namespace=content_namespace(namespace))
            probe.allocate([row], [1])
            probe.confirm()
            self._roots[key] = next(iter(probe.cached_contents()))[0]
            self._namespaces[self._roots[key]] = namespace
        return self._roots[key]

    def namespace_of(self, root: bytes) -> object:
        """The namespace whose root this is, once `root` has been asked for it."""
        return self._namespaces[root]


def content_namespace(namespace: Any) -> Any:
    """The namespace that our scheduler gives to the manager for a request's (salt, adapter, extra key)."""
    _, *parts = namespace
    return None if parts == [None, None, None] else tuple(parts)
