"""Blocks of KV outside memory: a seam of three calls, and a folder on a disk behind it (`paged.storage.disk_store`)."""

from paged.storage.store import BlockStore, Copy, StoreStats

__all__ = ["BlockStore", "Copy", "StoreStats"]
