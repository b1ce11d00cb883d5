"""Threads: as many as cores that nobody else uses, and never more than there were."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event

import pytest
import torch

from paged.model import threads
from paged.model.native import packed
from paged.model.threads import THREADS, FreeCores, Reading, Threads, read_usage, usable_cores


def readings(*usage):
    """Readings a second apart, in which all and we have used so many cores."""
    start, all_used, ours = time.monotonic() - 100.0, 50.0, 7.0
    found = [Reading(start, all_used, ours)]
    for number, (by_all, by_us) in enumerate(usage, 1):
        all_used, ours = all_used + by_all, ours + by_us
        found.append(Reading(start + number, all_used, ours))
    return iter(found)


@pytest.mark.parametrize(
    ("usage", "cores", "free"),
    [
        *(([(0.0, 0.0)], 4, [4]), ([(3.9, 3.9)], 4, [4]), ([(1.0, 0.0)], 4, [3]), ([(1.4, 0.0)], 4, [3])),
        *(([(1.7, 0.0)], 4, [2]), ([(4.0, 2.0)], 4, [2]), ([(4.0, 0.5)], 4, [1]), ([(3.0, 0.0)], 4, [1])),
        # Hundredths of a second do not add up to the last bit.
        ([(1.0, 1.1)], 4, [4]),
        # Others come and go.
        ([(2.0, 2.0), (2.0, 1.0), (2.0, 1.0), (1.0, 1.0)], 2, [2, 1, 1, 2]),
    ],
)
def test_a_core_that_others_use_is_not_free(usage, cores, free):
    found = readings(*usage)
    its = FreeCores(lambda: next(found), cores=cores)
    assert [its.count() for _ in free] == free
    assert FreeCores(lambda: None, cores=3).count() == 3, "nothing is read here"


def test_a_reading_is_used_for_half_a_second():
    times, reads = iter([0.1, 0.4, 0.6, 0.7]), iter([0.0, 0.6])
    cores = FreeCores(lambda: Reading(next(reads), 0.0, 0.0), cores=2, clock=lambda: next(times))
    for _ in range(4):
        cores.count()
    assert list(reads) == []


def test_what_is_read_here_is_what_is_used_here():
    before = read_usage()
    if before is None:
        pytest.skip("no counters here")
    began = time.process_time()
    while time.process_time() - began < 0.3:
        pass
    after = read_usage()
    assert after.used_by_us - before.used_by_us >= 0.3
    # The counters are in hundredths of a second, and others may have used more.
    assert after.used_by_all - before.used_by_all >= 0.2
    assert 1 <= usable_cores() <= os.cpu_count()


def test_a_group_s_limit_counts(monkeypatch, tmp_path):
    file = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "_GROUP_LIMIT", file)
    whole = usable_cores()
    for text, cores in (("max 100000", whole), ("100000 100000", 1), ("50000 100000", 1), ("99900000 100000", whole)):
        file.write_text(text + "\n")
        assert usable_cores() == cores


@pytest.fixture(autouse=True)
def _three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_the_fewest_count_and_nobody_gets_more_than_there_were():
    ours, seen = Threads(), []
    with ours.at_most(8):
        seen.append(torch.get_num_threads())
        with ours.at_most(1), ours.at_most(2):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())
    assert [*seen, torch.get_num_threads()] == [3, 1, 3, 3]


def test_two_that_run_at_once_leave_the_number_of_threads_as_it_was():
    inside, may_go = Event(), Event()

    def other():
        with THREADS.at_most(1):
            inside.set()
            may_go.wait()

    with ThreadPoolExecutor() as pool:
        with THREADS.at_most(1):
            first = pool.submit(other)
            inside.wait()
        may_go.set()
        first.result()
    with ThreadPoolExecutor() as fresh:
        assert fresh.submit(torch.get_num_threads).result() == 3


def test_a_trial_of_c_code_that_outlasts_another_caller_leaves_the_number_of_threads_as_it_was(monkeypatch):
    (other := ExitStack()).enter_context(THREADS.at_most(1))
    monkeypatch.setattr(packed, "_check_invariance", lambda *_: other.close())
    packed.model_library.__wrapped__()
    assert torch.get_num_threads() == 3


def test_the_command_line_lets_threads_wait_asleep_and_leaves_what_was_set(run_python):
    program = """
import os, sys
from paged.cli import main, signals
signals.leave = lambda status: None
sys.argv = ["paged", "policies", "--json"]
for given in ({}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
    os.environ.update(given)
    main()
    print("SPIN", os.environ.get("GOMP_SPINCOUNT"))
"""
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stdout.splitlines() if line.startswith("SPIN")]
    assert said == ["SPIN 2000", "SPIN 7", "SPIN None"]
