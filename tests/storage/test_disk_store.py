"""A store of blocks in a folder: what was written is found again, by this process and the next one, and nothing else
ever is."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from paged.errors import BudgetTooSmall, UnusableStore
from paged.storage.disk_store import DiskStore
from paged.storage.object_file import HEADER_BYTES

from ..driving import wait_until  # noqa: TID252

BLOCK, LARGE = 512, 2**17
IDENTITY = b"a model".ljust(32)


def keys_of(name, num):
    return [sha256(f"{name} {place}".encode()).digest() for place in range(num)]


def blocks_of(keys, size=BLOCK):
    return np.stack([np.frombuffer(key * (size // 32), np.uint8) for key in keys])


def write(store, keys, size=BLOCK):
    return store.write(keys, lambda places: blocks_of([keys[place] for place in places], size))


def keep(store, keys, size=BLOCK):
    """Write these, and wait until they are on the disk."""
    write(store, keys, size)
    store.flush()


def read(store, keys, size=BLOCK):
    into = np.zeros((len(keys), size), np.uint8)
    count = store.read(keys, into)
    assert np.array_equal(into[:count], blocks_of(keys, size)[:count])
    return count


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def open_store(folder):
    stores = []

    def make(blocks=1000, identity=IDENTITY, size=BLOCK, **options):
        limit = blocks * (size + HEADER_BYTES)
        stores.append(DiskStore(folder, limit_bytes=limit, block_bytes=size, identity=identity, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_large_blocks_are_read_by_several_threads_and_end_before_the_first_that_is_spoiled(open_store):
    store, keys = open_store(size=LARGE), keys_of("a", 20)
    keep(store, keys, LARGE)
    assert read(store, keys, LARGE) == 20
    os.truncate(store.path_of(keys[7]), 1000)
    assert read(store, keys, LARGE) == store.look_up(keys) == 7


def test_a_look_up_ends_at_the_first_block_that_is_not_there_and_finds_none_of_another_model(open_store):
    keys, ours = keys_of("a", 4), open_store()
    keep(ours, [keys[0], keys[1], keys[3]])
    theirs = open_store(identity=b"another model".ljust(32))
    for store, found, missed in ((ours, 2, 1), (theirs, 0, 4)):
        assert (store.look_up(keys), read(store, keys), store.stats().missed) == (found, found, missed)


def test_two_processes_on_one_folder_find_what_the_other_wrote_while_both_run(open_store):
    one, other, keys = open_store(), open_store(), keys_of("a", 3)
    keep(one, keys)
    other.flush()
    keep(other, keys_of("b", 1))
    # It looks when it has nothing to write.
    wait_until(lambda: other.look_up(keys))
    assert read(other, keys) == 3


def test_the_block_that_was_not_used_for_longest_goes_first_and_of_a_prompt_its_last(open_store):
    store, old, new = open_store(blocks=6), keys_of("old", 3), keys_of("new", 3)
    for keys in (old, new):
        keep(store, keys)
    assert store.look_up(old) == 3
    store.flush()
    keep(store, keys_of("newest", 2))
    assert (store.look_up(new), store.stats().evicted, read(store, new)) == (1, 2, 1)
    # Then those that were looked up before.
    keep(store, keys_of("last", 2))
    assert (store.look_up(old), store.look_up(new)) == (1, 1)


def test_the_limit_holds_for_all_models_of_a_folder(open_store, folder):
    theirs = open_store(identity=b"another model".ljust(32), blocks=4)
    keep(theirs, keys_of("theirs", 4))
    ours = open_store(blocks=4)
    keep(ours, keys_of("ours", 3))
    assert len([*folder.glob("objects/*/*")]) == 4
    assert read(theirs, keys_of("theirs", 4)) == 1


def test_a_queue_that_is_smaller_than_a_block_takes_one_at_a_time(open_store):
    assert write(open_store(queue_bytes=1), keys_of("a", 2)) == 1


def test_a_full_queue_takes_no_more_and_copies_nothing_for_it(open_store):
    store, keys, copied = open_store(queue_bytes=2 * (BLOCK + HEADER_BYTES)), keys_of("a", 5), []

    def copy(places):
        copied.extend(places)
        return blocks_of([keys[place] for place in places])

    assert store.write(keys, copy) == 2
    assert (copied, store.stats().dropped) == ([0, 1], 3)
    store.flush()
    assert store.write(keys, copy) == 4
    assert copied == [0, 1, 2, 3]


@pytest.fixture
def keys(open_store):
    """Of three objects in a store that was closed."""
    store, found = open_store(), keys_of("a", 3)
    write(store, found)
    store.close()
    return found


def changed(statement):
    """A harm: this is done to the index."""

    def spoil(index):
        with closing(sqlite3.connect(index)) as found, found:
            found.execute(statement)

    return spoil


def without_page(number):
    def spoil(index):
        data = bytearray(index.read_bytes())
        assert len(data) == 8 * 4096
        data[number * 4096 : (number + 1) * 4096] = b"\xa5" * 4096
        index.write_bytes(data)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        *(lambda index: index.write_bytes(b""), lambda index: index.write_bytes(b"no database at all" * 100)),
        *(changed("DELETE FROM objects"), changed("DROP TABLE objects"), *map(without_page, range(8))),
    ],
)
def test_objects_of_a_lost_or_broken_index_are_found_again_and_others_are_written(open_store, folder, keys, spoil):
    spoil(folder / "index.sqlite")
    again = open_store()
    again.flush()
    assert read(again, keys[: again.look_up(keys)]) == 3
    keep(again, keys_of("b", 1))
    assert (again.stats().written, again.stats().failed) == (1, 0)


def test_an_object_of_the_future_is_found_again_and_goes_in_its_turn(open_store, folder, keys):
    (folder / "index.sqlite").unlink()
    for path in folder.glob("objects/*/*"):
        os.utime(path, (2**34, 2**34))
    again = open_store(blocks=4)
    again.flush()
    assert again.look_up(keys) == 3
    keep(again, keys_of("b", 4))
    assert (again.look_up(keys), again.look_up(keys_of("b", 4))) == (0, 4)


def test_a_smaller_limit_holds_from_the_start_on(open_store, folder):
    store = open_store()
    write(store, keys_of("a", 9))
    store.close()
    again = open_store(blocks=4)
    again.flush()
    assert (len([*folder.glob("objects/*/*")]), again.stats().held, again.stats().evicted) == (4, 4, 5)


def test_what_is_no_object_of_ours_is_swept_away(open_store, folder):
    open_store().close()
    for name, data in (("00" * 32, b"junk"), ("not a key", b"junk")):
        (folder / "objects/00").mkdir(exist_ok=True)
        (folder / "objects/00" / name).write_bytes(data)
    open_store().flush()
    assert [*folder.glob("objects/*/*")] == []


def test_an_object_that_is_gone_is_a_miss_and_is_written_again(open_store):
    store, keys = open_store(), keys_of("a", 2)
    keep(store, keys)
    store.path_of(keys[0]).unlink()
    assert (store.look_up(keys), read(store, keys), store.look_up(keys)) == (2, 0, 0)
    keep(store, keys)
    assert read(store, keys) == 2


def test_a_folder_that_is_removed_under_way_is_a_miss_and_stays_removed(open_store, folder):
    store, keys = open_store(), keys_of("a", 2)
    keep(store, keys)
    shutil.rmtree(folder)
    assert read(store, keys) == 0
    keep(store, keys_of("b", 2))
    assert (store.stats().failed, store.look_up(keys_of("b", 2)), folder.exists()) == (2, 0, False)


@pytest.mark.parametrize(
    ("name", "error"),
    [("os.writev", OSError(28, "No space left on device")), ("paged.storage.disk_store.write_object", MemoryError())],
)
def test_a_writer_without_room_or_memory_loses_what_it_cannot_write_and_goes_on(open_store, monkeypatch, name, error):
    store, keys = open_store(), keys_of("a", 2)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(name, fail)
        write(store, keys)
        wait_until(lambda: store.stats().failed == 2)
    assert (store.stats().queued, store.look_up(keys)) == (0, 0)
    keep(store, keys)
    assert read(store, keys) == 2


def test_a_closed_store_leaves_no_thread_and_a_late_read_of_it_is_no_error(open_store):
    before, keys, store = set(threading.enumerate()), keys_of("a", 4), open_store(size=LARGE)
    keep(store, keys, LARGE)
    assert read(store, keys, LARGE) == 4
    store.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before
    assert read(store, keys, LARGE) == 4


def test_a_limit_below_one_block_is_refused_with_numbers(folder):
    with pytest.raises(BudgetTooSmall, match=r"disk cache of 511 bytes .* one block, which takes 632 bytes") as caught:
        DiskStore(folder, limit_bytes=511, block_bytes=BLOCK, identity=IDENTITY)
    assert (caught.value.wanted, caught.value.given, folder.exists()) == (BLOCK + HEADER_BYTES, 511, False)


def a_file(folder):
    folder.write_text("a file")


def files(**texts):
    """A folder with these."""

    def make(folder):
        folder.mkdir()
        for name, text in texts.items():
            (folder / name.replace("_", "-")).write_text(text)

    return make


def a_newer_index(folder):
    files(paged_kv_cache="paged KV cache, form 1\n")(folder)
    changed("PRAGMA user_version = 2")(folder / "index.sqlite")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (a_file, "File exists"),
        (files(thesis="mine"), 'not a KV cache of paged: "thesis" lies there'),
        # Its first opening was not killed.
        (files(thesis="mine", paged_kv_cache=""), '"thesis" lies there'),
        (files(paged_kv_cache="paged KV cache, form 2\n"), "its form is 2; this version of paged reads 1"),
        (files(paged_kv_cache="something else\n"), "is not paged's"),
        (a_newer_index, "its index is of form 2, newer"),
    ],
)
def test_a_folder_that_is_not_ours_is_refused_and_left_as_it_is(open_store, folder, make, problem):
    make(folder)
    before = {path: path.read_bytes() for path in [folder, *folder.glob("**/*")] if path.is_file()}
    with pytest.raises(UnusableStore, match=problem) as caught:
        open_store()
    assert caught.value.folder == folder
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("names", [["paged-kv-cache"], ["paged-kv-cache.new"], ["paged-kv-cache", "lock"]])
def test_a_folder_whose_first_opening_was_killed_is_opened(open_store, folder, names):
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    store = open_store()
    write(store, keys_of("a", 2))
    store.close()
    assert read(open_store(), keys_of("a", 2)) == 2


def unsupported(*_):
    raise OSError(95, "Operation not supported")


@pytest.mark.parametrize(
    ("name", "call", "problem"),
    [
        ("os.geteuid", lambda: 4242, "this process is user 4242"),
        ("os.access", lambda *_: False, "it cannot be written"),
        ("fcntl.flock", unsupported, "Operation not supported"),
        ("pathlib.Path.rename", unsupported, "Operation not supported"),
    ],
)
def test_a_folder_of_another_user_or_that_cannot_be_used_is_refused_and_nothing_stays_open(
    open_store, folder, monkeypatch, name, call, problem
):
    open_store().close()
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(name, call)
    with pytest.raises(UnusableStore, match=problem):
        open_store()
    assert (os.listdir("/proc/self/fd"), [*(folder / "writing").iterdir()]) == (before, [])


def test_a_store_that_was_not_closed_writes_what_it_took_before_its_process_ends(open_store, folder):
    program = f"""
from tests.storage.test_disk_store import *
store = DiskStore({str(folder)!r}, limit_bytes=10**6, block_bytes=BLOCK, identity=IDENTITY)
write(store, keys_of("a", 100))
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
    again, keys = open_store(), keys_of("a", 100)
    assert again.look_up([*keys, *keys_of("b", 1)]) == read(again, keys) == 100


def test_what_a_dead_process_was_writing_goes_and_what_a_living_one_is_writing_stays(open_store, folder):
    living = open_store()
    dead = folder / "writing/dead"
    dead.mkdir()
    (dead / "half").write_text("h")
    (folder / "writing/dead.lock").touch()
    open_store()
    assert not dead.exists()
    keep(living, keys_of("a", 1))
    assert read(living, keys_of("a", 1)) == 1
