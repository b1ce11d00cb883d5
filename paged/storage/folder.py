"""The folder of a disk store: whether it is ours and usable, whether other processes use it, and the path of each object.

DIR/paged-kv-cache      the marker: what this folder is, and the version of its form
DIR/lock                held while a process opens the folder
DIR/index.sqlite        with its write-ahead log
DIR/objects/3f/3f91…    an object by its key
DIR/writing/ID/         what a process is writing; it holds ID.lock beside it
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paged.errors import UnusableStore
from paged.storage.object_file import sync_object

_MARKER, _FORM = "paged-kv-cache", "paged KV cache, form "
_VERSION = 1
_NEW_MARKER = f"{_MARKER}.new"
_OPENING = {"lock", _MARKER, _NEW_MARKER}
"""Files of a folder whose first process was killed while it opened it. All others are written after the marker."""
_LOCK_S = 10.0
"""Most time that another process may take to open the folder."""
KEY_BYTES = 32


class Folder:
    """An open folder, and this process's own place in it to write.

    is_alone  no other process used it when it was opened

    Raises UnusableStore for a folder that is not ours, of another form, of another user, that cannot be written, or on a
    file system without locks or rename.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check(path)
            with _locked(path / "lock", path):
                self._begin()
        except UnusableStore:
            raise
        except OSError as error:
            raise UnusableStore(path, f"it cannot be used: {error.strerror or error}") from error

    def _begin(self) -> None:
        marker, objects, writing = self.path / _MARKER, self.path / "objects", self.path / "writing"
        if not _has_text(marker):
            new = self.path / _NEW_MARKER
            new.write_text(f"{_FORM}{_VERSION}\n")
            sync_object(new)
            new.rename(marker)
        objects.mkdir(mode=0o700, exist_ok=True)
        writing.mkdir(mode=0o700, exist_ok=True)
        self.is_alone = not _remove_dead(writing)
        name = uuid.uuid4().hex
        self._lock_path, self._writing = writing / f"{name}.lock", writing / name
        self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._writing.mkdir(mode=0o700)
            # A file system without rename fails here, not at the first block.
            probe = self._writing / "probe"
            probe.touch()
            probe.rename(self._writing / "renamed")
            (self._writing / "renamed").unlink()
        except BaseException:
            self.close()
            raise

    @property
    def index(self) -> Path:
        """The path of the index."""
        return self.path / "index.sqlite"

    def object(self, key: bytes) -> Path:
        """Return the path of an object."""
        name = key.hex()
        return self.path / "objects" / name[:2] / name

    def new(self, key: bytes) -> Path:
        """Return the path where an object is written before `put`."""
        return self._writing / key.hex()

    def put(self, key: bytes) -> None:
        """Move a written object to its path, over one that is there. Raises OSError."""
        target = self.object(key)
        try:
            self.new(key).rename(target)
        except FileNotFoundError:
            # Without its parents: a folder that was removed stays removed.
            target.parent.mkdir(mode=0o700, exist_ok=True)
            self.new(key).rename(target)

    def drop(self, key: bytes) -> None:
        """Remove an object, if it is there."""
        with suppress(OSError):
            self.object(key).unlink()

    def forget_new(self, key: bytes) -> None:
        """Remove a written object that was not `put`."""
        with suppress(OSError):
            self.new(key).unlink()

    def shards(self) -> Iterator[tuple[Path, list[str]]]:
        """Yield each folder of objects, and the names in it."""
        for number in range(256):
            shard = self.path / "objects" / f"{number:02x}"
            with suppress(OSError):
                yield shard, os.listdir(shard)

    def close(self) -> None:
        """Remove this process's place to write. Calling it again does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self._writing, ignore_errors=True)
            with suppress(OSError):
                self._lock_path.unlink()
            os.close(self._lock)
            self._lock = -1


def _check(path: Path) -> None:
    """Raise UnusableStore unless the folder is empty or ours."""
    owner, me = path.stat().st_uid, os.geteuid()
    if owner != me:
        raise UnusableStore(
            path, f"it belongs to user {owner}, and this process is user {me}; name a folder of its own"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise UnusableStore(path, "it cannot be written")
    marker = path / _MARKER
    # List before the marker is read: a process that opens the folder now writes the marker first.
    others = sorted(set(os.listdir(path)) - _OPENING)
    if not _has_text(marker):
        if others:
            raise UnusableStore(path, f'it is not a KV cache of paged: "{others[0]}" lies there; name an empty folder')
        return
    text = marker.read_text(errors="replace").strip()
    version = text.removeprefix(_FORM)
    if not text.startswith(_FORM) or not version.isdecimal():
        raise UnusableStore(path, f"its file {_MARKER} is not paged's; name an empty folder")
    if int(version) != _VERSION:
        raise UnusableStore(path, f"its form is {version}; this version of paged reads {_VERSION}; name another folder")


def _has_text(marker: Path) -> bool:
    """Whether a marker has text. Without, a process was killed while it wrote it."""
    return marker.exists() and marker.read_bytes().strip() != b""


@contextmanager
def _locked(lock: Path, folder: Path) -> Iterator[None]:
    """Hold a file's lock. Raises UnusableStore if another process holds it for long, or the file system has no locks."""
    number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        ends = time.monotonic() + _LOCK_S
        while not _has_locked(number, folder):
            if time.monotonic() > ends:
                raise UnusableStore(folder, f"another process has been opening it for {_LOCK_S:.0f} s")
            time.sleep(0.01)
        yield
    finally:
        os.close(number)


def _has_locked(number: int, folder: Path) -> bool:
    """Try to take a lock, and return whether it is held now. Raises UnusableStore if the file system has no locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UnusableStore(folder, f"its file system has no locks: {error.strerror}") from error
    return True


def _remove_dead(writing: Path) -> bool:
    """Remove what dead processes were writing. Return whether a living one uses the folder. The caller holds the folder's
    lock, so that no other process opens it meanwhile."""
    are_living = False
    for lock in writing.glob("*.lock"):
        try:
            number = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            are_living = True
        else:
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            with suppress(OSError):
                lock.unlink()
        finally:
            os.close(number)
    return are_living
