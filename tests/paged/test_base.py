"""What paged stands on: blocks that Ctrl-C waits for, arrays that grow, and files that are written whole."""

import signal as signals
from signal import SIGINT, default_int_handler, getsignal, raise_signal, signal
from threading import Event, Thread

import numpy as np
import pytest

from paged.base.growing import GrowingView
from paged.base.uninterrupted import ENDING, Uninterrupted, handled_by
from paged.base.whole_file import whole_file
from paged.errors import UnwritablePath
from paged.study.report import writable


@pytest.fixture(autouse=True)
def _pythons_own_handler():
    before = signal(SIGINT, default_int_handler)
    yield
    assert getsignal(SIGINT) is default_int_handler
    signal(SIGINT, before)


def interrupted_twice_deep(done):
    with Uninterrupted():
        with Uninterrupted():
            raise_signal(SIGINT)
            done.append("inner")
        done.append("outer")
        raise ZeroDivisionError


def test_ctrl_c_waits_for_the_end_of_the_outermost_block_behind_whose_error_it_comes():
    done = []
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted_twice_deep(done)
    assert done == ["inner", "outer"]
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_a_handler_of_the_programs_own_is_left_alone():
    seen = []
    signal(SIGINT, lambda *_: seen.append("now"))
    with Uninterrupted():
        raise_signal(SIGINT)
        assert seen == ["now"]
    signal(SIGINT, default_int_handler)


def test_a_thread_that_is_not_the_main_one_sets_no_handler():
    def run():
        with Uninterrupted():
            handlers.append(getsignal(SIGINT))

    handlers = []
    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [default_int_handler]


def test_an_interrupt_while_handlers_are_replaced_puts_back_those_that_were(monkeypatch):
    before, real = [getsignal(number) for number in ENDING], signals.signal

    def interrupted_at_the_second(number, handler):
        if number == ENDING[1] and handler is signals.SIG_IGN:
            raise KeyboardInterrupt
        return real(number, handler)

    monkeypatch.setattr(signals, "signal", interrupted_at_the_second)
    with pytest.raises(KeyboardInterrupt), handled_by(signals.SIG_IGN, in_place_of=lambda _: True):
        raise AssertionError("the block is not entered")
    assert [getsignal(number) for number in ENDING] == before


def test_a_view_is_as_long_as_asked_for_though_another_thread_makes_a_shorter_array_meanwhile():
    has_begun, may_end = Event(), Event()

    class Long(np.ndarray):
        @property
        def flags(self):
            # The other thread ends between the making of this array and the view of it.
            may_end.set()
            other.join()
            return super().flags

    def make(length):
        if length == 2:
            has_begun.set()
            may_end.wait()
        return np.arange(length).view(Long if length == 200 else np.ndarray)

    view = GrowingView(make)
    other = Thread(target=view.first, args=(1,))
    other.start()
    has_begun.wait()
    assert len(view.first(100)) == 100


def write_half(path):
    with whole_file(path) as file:
        file.write("half")
        raise KeyboardInterrupt


def test_what_raises_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt):
        write_half(path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_what_is_written_takes_the_place_with_its_rights_behind_a_link(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)
    with whole_file(link) as file:
        file.write("after")
        assert path.read_text() == "before"
    assert link.is_symlink() and path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o640


def test_what_is_no_regular_file_is_written_as_it_comes(tmp_path):
    assert writable("/dev/null").name == "null"
    with whole_file("/dev/null") as file:
        file.write("gone")
    with (
        pytest.raises(UnwritablePath, match="/dev/full: cannot be written, no space left"),
        whole_file("/dev/full") as file,
    ):
        file.write("x" * 100_000)


def test_an_error_of_another_file_names_that_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="other"), whole_file(tmp_path / "a.txt"):
        (tmp_path / "other").read_text()
    with pytest.raises(BrokenPipeError), whole_file(tmp_path / "a.txt"):
        raise BrokenPipeError
    assert list(tmp_path.iterdir()) == []
