"""A plan: the highest rate, the smallest memory or the fewest devices at which a trace meets its targets for latencies, and all tried values."""

from collections.abc import Callable
from typing import Literal

import msgspec

from paged.base.fields import Finite
from paged.errors import InvalidConfig
from paged.study.limits import check
from paged.study.simulator.scenario import Scenario
from paged.study.simulator.search import Value
from paged.study.simulator.trace_facts import TraceFacts

Promise = Literal["ttft_s", "gap_s", "itl_s", "rejected", "cut_off"]
"""A target by name; or one of every service: no request is rejected, and no output cut off, because the pool is too small for it."""
_TARGETS: tuple[Promise, ...] = ("ttft_s", "gap_s", "itl_s")


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The most that 99th percentiles may be, in seconds; None: no such target. Raises InvalidConfig without a target, and for one that is not above 0.

    ttft_s  of time to first token, a value a request
    gap_s   of the longest gap between two tokens, a value a request
    itl_s   of all gaps between two tokens
    """

    ttft_s: Finite | None = None
    gap_s: Finite | None = None
    itl_s: Finite | None = None

    def __post_init__(self) -> None:
        if not self.given():
            raise InvalidConfig("no target was given; at least one of ttft, gap and itl is needed")
        check(self)

    def given(self) -> list[tuple[Promise, float]]:
        """Return names and seconds of the targets that are set."""
        return [(name, seconds) for name in _TARGETS if (seconds := getattr(self, name)) is not None]


class Miss(msgspec.Struct, frozen=True):
    """A promise that was broken.

    limit  seconds; 0 requests for `rejected`, 0 tokens for `cut_off`
    found  the figure, in the same unit; None if the simulation ended early, when it could no longer meet `limit`
    """

    promise: Promise
    limit: float
    found: float | None


class P99s(msgspec.Struct, frozen=True):
    """99th percentiles over all replicas, each of the seed in which it is highest, in seconds; None without a value."""

    ttft_s: float | None
    gap_s: float | None
    itl_s: float | None


class Probe(msgspec.Struct, frozen=True):
    """A value that was tried.

    misses       the broken promises; empty: it met
    p99          None if a simulation ended early
    ttft_by_quarter_s
                 median time to first token of each quarter of the requests by arrival, of the seed in which the last quarter waits longest: it
                 shows a queue that only grows. Empty if a simulation ended early
    simulations  that were run: seeds × replicas, or fewer if one decided before
    """

    value: float
    misses: tuple[Miss, ...]
    p99: P99s | None
    ttft_by_quarter_s: tuple[float | None, ...]
    simulations: int
    steps: int
    wall_s: float

    @property
    def met(self) -> bool:
        """Whether every promise was kept, with every seed."""
        return not self.misses


Find = Literal["rate", "memory", "devices"]
TOLERANCES: dict[Find, float] = {"rate": 0.02, "memory": 0.01, "devices": 0.0}
"""The share by which the answer may differ from the nearest value that misses; neighbouring counts are always near enough."""


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """How a token budget was chosen if none was named.

    first     the budget that cost model and targets suggest, with which the search began
    step_s    seconds of a full step with the decodes of a plausible batch, by the cost model
    limit_s   the most that a step may take between two tokens; None: no target limits it
    against   other budgets, rising, and whether each met at the value where the best before it missed
    """

    first: int
    step_s: float
    limit_s: float | None
    against: dict[int, bool]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A search and its answer.

    find            rate (a factor on the load's arrivals, as `Load.rate`), memory (blocks), or devices (replicas of the scenario's device)
    scenario        the search began at its rate or blocks; a token budget that was weighed is a number in it
    weighed         how that number was chosen; None: the budget was named, or is the policy's own
    seeds           a value has to meet with each of so many seeds
    tolerance       a share of the answer
    answer          the hardest value that met; None: none did
    missed          the nearest harder value that missed; None: there is no harder value
    probes          all tried values, rising
    load            the trace of the first seed, at the scenario's rate
    requests        of the trace, of which `left_out` were longer than the context and are in no simulation
    prompts_over_budget
                    prompts longer than the token budget of a policy that does not split them
    arrivals_per_s  at rate 1, over the whole trace of the first seed; None if all arrive at once, or in a closed loop
    num_blocks      of the scenario's pool; pages if layers are of several kinds
    groups          pages of a block or a sequence for each kind of layer, in words; empty if a block is of all layers
    kv_bytes        of a block, or page, on a device; None without a model
    """

    find: Find
    scenario: Scenario
    targets: Targets
    seeds: int
    tolerance: float
    answer: Value | None
    missed: Value | None
    probes: tuple[Probe, ...]
    load: TraceFacts
    requests: int
    left_out: int
    prompts_over_budget: int
    arrivals_per_s: float | None
    num_blocks: int
    groups: tuple[str, ...]
    kv_bytes: int | None
    weighed: Weighed | None = None

    @property
    def best(self) -> Probe:
        """The probe of the answer, or of the easiest tried value if there is none."""
        if self.answer is None:
            return self.probes[0 if self.find == "rate" else -1]
        return next(probe for probe in self.probes if probe.value == self.answer)

    @property
    def exceptions(self) -> tuple[Probe, ...]:
        """Probes that missed at an easier value than the answer, where more was not better."""
        if self.answer is None:
            return ()
        sign = 1 if self.find == "rate" else -1
        return tuple(probe for probe in self.probes if not probe.met and sign * (self.answer - probe.value) > 0)

    @property
    def cost_per_hour(self) -> float | None:
        """The price of the answer; the scenario's is that of a replica. None without an answer or a price."""
        price = self.scenario.price_per_hour
        if price is None or self.answer is None:
            return None
        return price * self.answer if self.find == "devices" else price

    @property
    def cost_per_million_tokens(self) -> float | None:
        """The price of a million output tokens at the answer's rate of arrivals. None without an answer, a price or such a rate."""
        cost, per_s = self.cost_per_hour, self.load.per_s
        if cost is None or per_s is None or self.answer is None:
            return None
        if self.find == "rate":
            per_s *= self.answer / self.scenario.load.rate
        return cost / (per_s * 3600 * self.load.outputs.mean) * 1e6

    def scenario_at(self, value: Value) -> Scenario:
        """Return the simulated scenario at a value, with the first seed; for devices, that of each replica."""
        return scenario_at(self.find, self.scenario, value)


class Progress(msgspec.Struct, frozen=True):
    """A search that is about to try a value, or has ended (None): its place among the searches, and its plan so far, without an answer and with its
    probes in the order of their trials."""

    place: int
    plan: Plan
    value: Value | None


Watching = Callable[[Progress], object]


def scenario_at(find: Find, scenario: Scenario, value: Value) -> Scenario:
    """Return the simulated scenario at a value; for devices, that of each replica."""
    if find == "rate":
        return msgspec.structs.replace(scenario, load=msgspec.structs.replace(scenario.load, rate=value))
    return msgspec.structs.replace(scenario, blocks=int(value)) if find == "memory" else scenario
