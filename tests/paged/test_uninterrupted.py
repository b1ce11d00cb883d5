"""Ctrl-C waits for the end of a block, where it can."""

import signal as signals
from signal import SIGINT, default_int_handler, getsignal, raise_signal, signal
from threading import Thread

import pytest

from paged.base.uninterrupted import ENDING, Uninterrupted, handled_by


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
