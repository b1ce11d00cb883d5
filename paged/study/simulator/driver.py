"""Searches side by side: each yields rounds of trials, which run in this process or in others, and receives their tallies."""

from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

from paged.study.limits import at_least
from paged.study.simulator.trial import Round, Tally, tried
from paged.study.simulator.workers import processes

T = TypeVar("T")
Search = Generator[Round, list[Tally], T]
"""Yields rounds, receives the tallies that decided each, and returns its result."""


def driven(searches: Sequence[Search[T]], *, jobs: int = 1) -> list[T]:
    """Run searches and return their results: with one job one after another in this process, else all at once in `jobs` processes.

    Results do not depend on `jobs`. Raises InvalidConfig below one job, and what a trial raises, which ends the other searches.
    """
    at_least("jobs", jobs, 1)
    return [_alone(search) for search in searches] if jobs == 1 else _side_by_side(searches, jobs)


def _alone(search: Search[T]) -> T:
    tallies = None
    while True:
        try:
            asked = _sent(search, tallies)
        except StopIteration as end:
            return end.value
        tallies = []
        for trial in asked.trials:
            tallies.append(tried(trial))
            if asked.misses(tallies) is not None:
                break


def _side_by_side(searches: Sequence[Search[T]], jobs: int) -> list[T]:
    found: dict[int, T] = {}
    under_way: dict[int, tuple[Round, list[Future[Tally]]]] = {}
    with processes(jobs) as pool:

        def go_on(place: int, tallies: list[Tally] | None) -> None:
            try:
                asked = _sent(searches[place], tallies)
            except StopIteration as end:
                found[place] = end.value
                under_way.pop(place, None)
            else:
                under_way[place] = asked, [pool.submit(tried, trial) for trial in asked.trials]

        for place in range(len(searches)):
            go_on(place, None)
        while under_way:
            running = [future for _, futures in under_way.values() for future in futures if not future.done()]
            wait(running, return_when=FIRST_COMPLETED)
            for place, (asked, futures) in list(under_way.items()):
                tallies = _deciding(asked, futures)
                if tallies is not None:
                    # Cancel the seeds after the deciding one: else the report would depend on which process is faster.
                    for future in futures:
                        future.cancel()
                    go_on(place, tallies)
    return [found[place] for place in sorted(found)]


def _sent(search: Search[T], tallies: list[Tally] | None) -> Round:
    return next(search) if tallies is None else search.send(tallies)


def _deciding(asked: Round, futures: list[Future[Tally]]) -> list[Tally] | None:
    """Return the first tallies, up to the one that decides; None while one of them is missing."""
    tallies: list[Tally] = []
    for future in futures:
        if not future.done():
            return None
        tallies.append(future.result())
        if asked.misses(tallies) is not None:
            return tallies
    return None
