"""Blocks of KV outside memory: the interface of a store, and one in a folder on a disk (`paged.storage.disk_store`)."""

from paged.storage.store import BlockStore, Copy, StoreStats

__all__ = ["BlockStore", "Copy", "StoreStats"]
