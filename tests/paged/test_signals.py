"""Commands that a signal ends: the short form of `make signals`, and what each says of that which it had finished."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from paged.base import uninterrupted
from paged.cli import signals
from paged.study.simulator import workers
from paged.study.simulator.workers import _Worker, processes

TOOL = "try_signals"
# A machine that runs tests is busy: a limit here only ends a wait for what never comes. How soon a command ends on an idle machine is what
# `make signals` measures.
LIMIT_S = 120.0


def ended(*command):
    """A program of Python's that has ended by itself."""
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="sessions are looked up in /proc")
@pytest.mark.parametrize(
    ("name", "number", "after_s"),
    # At work, and at its start.
    [
        ("simulate", signal.SIGINT, 1.5), ("plan", signal.SIGTERM, 0.3), ("generate one", signal.SIGINT, 1.5),
        ("bench", signal.SIGTERM, 0.3),
    ],
)  # fmt: skip
def test_a_command_is_gone_and_leaves_nothing_half_done(tool, tmp_path, name, number, after_s):
    command = tool.COMMANDS[name]
    ran = tool.ran(command, tmp_path, number, after_s, to_all=number == signal.SIGINT, limit_s=LIMIT_S)
    assert ran.wrong == [], ran.said


def test_workers_of_a_study_end_with_a_program_that_is_killed(tool):
    program = (
        "from paged.study.simulator import Load, Scenario, grid, run_all\n"
        "if __name__ == '__main__':\n"
        "    base = Scenario(load=Load(trace='synthetic:poisson,rate=4,requests=100000,lengths=sharegpt'), blocks=2000)\n"
        "    print('begins', flush=True)\n"
        "    list(run_all(grid(base, policies=['paged', 'vllm']), jobs=2))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        process.stdout.readline()
        until = time.monotonic() + LIMIT_S
        while len(tool.session(process.pid)) <= 2:
            assert time.monotonic() < until, "no workers have come"
            time.sleep(0.02)
        process.kill()
    while tool.session(process.pid):
        assert time.monotonic() < until, "workers are left"
        time.sleep(0.02)


@pytest.mark.usefixtures("handled_by_python")
@pytest.mark.parametrize("call", ["start", "join"])
def test_an_interrupt_while_the_pools_own_thread_starts_or_is_waited_for_comes_behind_that(monkeypatch, call):
    """A pool that cannot wait for a thread which never started ends half."""
    kept, started, real = [], [], getattr(threading.Thread, call)

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        real(self)

    def study():
        with processes(1) as pool:
            kept.append(weakref.ref(pool._call_queue))
            pool.submit(int).result()
            started.extend(pool._processes.values())

    monkeypatch.setattr(f"concurrent.futures.process._ExecutorManagerThread.{call}", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        study()
    assert caught.tb is not None
    assert [worker.is_alive() for worker in started] == [False] * (call == "join")
    assert kept[0]() is None, "what the pool keeps holds its semaphores"


OURS = {module.__file__ for module in (workers, uninterrupted)}


def interrupted_at(number, study):
    """Whether the study, with Ctrl-C before line `number` that runs of it in modules of ours, was long enough for that."""
    seen = 0

    def trace(frame, event, _argument):
        nonlocal seen
        if frame.f_code.co_filename not in OURS:
            return None
        if event == "line":
            seen += 1
            if seen == number:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        study()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return seen >= number


@pytest.mark.usefixtures("handled_by_python")
def test_an_interrupt_before_any_line_leaves_no_pool(monkeypatch):
    pools = []

    class Pool(workers._Pool):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            pools.append("made")

        def shutdown(self, *arguments, **options):
            super().shutdown(*arguments, **options)
            pools.append("shut")

    def study():
        with processes(1):
            pass

    monkeypatch.setattr(workers, "_Pool", Pool)
    number, num_made = 1, 0
    while interrupted_at(number, study):
        assert pools in ([], ["made", "shut"]), f"line {number}"
        num_made += "made" in pools
        pools.clear()
        number += 1
    assert num_made > 30


def test_a_signal_while_a_worker_starts_comes_when_it_has_started(monkeypatch):
    order = []

    def start(self):
        signal.raise_signal(signal.SIGTERM)
        order.append("started")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", start)
    before = signal.signal(signal.SIGTERM, lambda *_: order.append("handled"))
    try:
        _Worker().start()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert order == ["started", "handled"]


HALF_A_RESULT = """
import sys, time
from multiprocessing.connection import Connection
from pathlib import Path
from paged.study.simulator.workers import processes

def half_told():
    send = Connection._send

    def half(self, buffer, *more):
        send(self, buffer[: len(buffer) // 2], *more)
        Path(sys.argv[1]).touch()
        time.sleep(60)

    Connection._send = half
    return bytes(100)

if __name__ == "__main__":
    try:
        with processes(1) as pool:
            pool.submit(half_told)
            while not Path(sys.argv[1]).exists():
                time.sleep(0.01)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_a_worker_that_is_ended_in_the_middle_of_its_result_leaves_nobody_waiting(tmp_path):
    program = tmp_path / "study.py"
    program.write_text(HALF_A_RESULT)
    done = ended(program, tmp_path / "half")
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


SWALLOWS = """
import time
from paged.cli import signals
signals.interrupt()
try:
    print("\\x1b[?25l", end="", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(60)
"""


def test_what_does_not_listen_is_ended_with_the_cursor_shown():
    ours, theirs = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", SWALLOWS], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 100) == b"\x1b[?25l"
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 143
    assert time.monotonic() - begun >= signals.GRACE_S
    assert b"\x1b[?25h" in os.read(ours, 100)
    os.close(ours)


ENDS_LATE = """
import os, signal, time
from paged.cli import signals
from paged.study.simulator import workers

def late(pool):
    time.sleep(60)

if __name__ == "__main__":
    signals.interrupt()
    workers._end_of_results = late
    with workers.processes(1) as pool:
        pool.submit(int).result()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
"""


def test_a_study_that_is_ended_late_leaves_no_semaphores(tmp_path):
    program = tmp_path / "study.py"
    program.write_text(ENDS_LATE)
    # Until the process that looks after semaphores has ended, too, which has the same standard error.
    done = ended(program)
    assert (done.returncode, done.stderr) == (143, "")


def test_a_command_that_has_ended_waits_for_no_library():
    program = "import atexit, time; from paged.cli import signals; atexit.register(time.sleep, 60); print(1); signals.leave(3)"
    done = ended("-c", program)
    assert (done.returncode, done.stdout) == (3, "1\n")


def test_behind_what_loads_signals_do_what_they_did_before():
    def ours(*_):
        pass

    before = signal.signal(signal.SIGTERM, ours)
    try:
        with signals.at_once():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)


def raise_while_interrupted():
    try:
        raise KeyboardInterrupt
    finally:
        int("seven")


def test_an_error_raised_while_an_interrupt_passed_is_the_interrupt():
    assert not signals.is_interrupt(ValueError())
    assert signals.is_interrupt(signals.Ended())
    with pytest.raises(ValueError, match="seven") as caught:
        raise_while_interrupted()
    assert signals.is_interrupt(caught.value)


@pytest.mark.parametrize(
    ("redirected", "status", "said"),
    [
        ("policies >&-", 2, "paged: standard output is closed\n"),
        ("policies > /dev/full", 2, "paged: standard output: No space left on device\n"),
        ("generate <&-", 2, "paged: no prompt; give --prompt TEXT, --file FILE, or lines on standard input.\n"),
        ("policies 2>&- > /dev/null", 0, ""),
    ],
)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_streams_that_are_closed_or_full_are_told_in_a_line(redirected, status, said):
    ran = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -m paged {redirected}', sys.executable], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (status, said)
