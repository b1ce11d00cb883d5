"""Several simulations side by side: every combination of varied options, in processes of their own, and intervals over seeds."""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import as_completed
from itertools import product
from statistics import stdev
from typing import TypeVar

import msgspec

from paged import Policy
from paged.errors import InvalidConfig
from paged.study.limits import at_least
from paged.study.simulator.scenario import Budget, Outcome, Scenario, run
from paged.study.simulator.workers import processes

T = TypeVar("T")
K = TypeVar("K")
# Two-sided 95 % of Student's t, by degrees of freedom; from 30 on the normal's.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045)  # fmt: skip
_NORMAL95 = 1.960


class Interval(msgspec.Struct, frozen=True):
    """A mean over seeds, and half the width of its 95 % confidence interval (Student's t); None for one seed."""

    mean: float
    half_width: float | None


def grid(
    base: Scenario,
    *,
    policies: Sequence[str | Policy] = (),
    blocks: Sequence[int | None] = (),
    rates: Sequence[float] = (),
    budgets: Sequence[Budget] = (),
    seeds: int = 1,
) -> list[Scenario]:
    """Return every combination, seeds innermost; options that are not varied are the base's. Raises InvalidConfig for fewer than one seed."""
    found: list[Scenario] = []
    varied = product(
        policies or [base.policy],
        blocks or [base.blocks],
        rates or [base.load.rate],
        budgets or [base.max_tokens_per_step],
        range(at_least("seeds", seeds, 1)),
    )
    for policy, num_blocks, rate, budget, number in varied:
        load = msgspec.structs.replace(base.load.seeded(number), rate=rate)
        found.append(
            msgspec.structs.replace(base, load=load, policy=policy, blocks=num_blocks, max_tokens_per_step=budget)
        )
    return found


def run_all(
    scenarios: Sequence[Scenario], *, jobs: int = 1, check: bool = False
) -> Generator[tuple[int, Outcome], None, None]:
    """Yield (place, outcome) of each scenario as it ends, in `jobs` processes; with one job in this process and in order.

    Raises what a scenario raises, which ends the others, as do Ctrl-C and the iterator's close.
    """
    jobs = min(at_least("jobs", jobs, 1), len(scenarios))
    if jobs <= 1:
        for place, scenario in enumerate(scenarios):
            yield place, run(scenario, check=check)
        return
    with processes(jobs) as pool:
        places = {pool.submit(run, scenario, check=check): place for place, scenario in enumerate(scenarios)}
        for future in as_completed(places):
            yield places[future], future.result()


def interval(values: Iterable[float]) -> Interval:
    """Return the interval of a figure over seeds. Raises InvalidConfig without values."""
    numbers = list(values)
    if not numbers:
        raise InvalidConfig("an interval of no values was asked for")
    if len(numbers) > 1 and min(numbers) == max(numbers):
        # Their mean may differ from them by rounding, which would give a width.
        return Interval(numbers[0], 0.0)
    count, mean = len(numbers), math.fsum(numbers) / len(numbers)
    if count == 1:
        return Interval(mean, None)
    factor = _T95[count - 2] if count - 2 < len(_T95) else _NORMAL95
    return Interval(mean, factor * stdev(numbers) / math.sqrt(count))


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by their key, in order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_seed(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Group outcomes that differ in their seed alone, in the order of the first of each group."""

    def without_seed(outcome: Outcome) -> Scenario:
        load = msgspec.structs.replace(outcome.scenario.load, seed=0, resampled=False)
        return msgspec.structs.replace(outcome.scenario, load=load)

    return list(grouped(outcomes, without_seed).values())
