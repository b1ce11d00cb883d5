"""Blocks of KV outside memory: a seam of three calls, and a folder on a disk behind it."""

from paged.storage.disk_store import DiskStore
from paged.storage.store import BlockStore, Copy, StoreStats

__all__ = ["BlockStore", "Copy", "DiskStore", "StoreStats"]
