"""The inverse of a simulation: the highest rate, the smallest memory or the fewest devices at which a trace meets its targets.

Knows what each of the three changes in a scenario, and what was found. Does not know how a value is tried, nor how a plan is shown.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Literal

import msgspec
import numpy as np

from paged import InvalidConfig
from paged.simulator.driver import Search, driven
from paged.simulator.probe import Probe, Round
from paged.simulator.scenario import Scenario
from paged.simulator.search import Axis, Counts, Rates, Value, search
from paged.simulator.targets import Targets
from paged.simulator.trial import Tally, Trial, trace_of
from paged.traces import Trace

Find = Literal["rate", "memory", "devices"]
TOLERANCES: dict[Find, float] = {"rate": 0.02, "memory": 0.01, "devices": 0.0}
"""How far, as a share, the answer may be from the nearest value that misses; counts that are neighbours are near enough in any case."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was sought, what was tried, what was found.

    find            rate (times the load's own arrivals, as `Load.rate`), memory (blocks), or devices (replicas of the scenario's device)
    scenario        as it was asked; its rate or blocks is where the search began
    seeds           a value meets where it does with each of so many
    tolerance       a share of the answer
    answer          the hardest value that met; None: none did
    missed          the nearest harder value that missed; None: none was tried, because the answer is the last value there is
    probes          all that was tried, by rising value
    requests        of the trace, of which `left_out` were longer than the context and are in no simulation
    arrivals_per_s  at rate 1, over the whole trace, of the first seed; None where all arrive at once, or a client waits for an answer
    num_blocks      of the scenario's pool, whatever is sought
    kv_bytes        that a block takes of a device; None without a model
    """

    find: Find
    scenario: Scenario
    targets: Targets
    seeds: int
    tolerance: float
    answer: Value | None
    missed: Value | None
    probes: tuple[Probe, ...]
    requests: int
    left_out: int
    arrivals_per_s: float | None
    num_blocks: int
    kv_bytes: int | None

    @property
    def best(self) -> Probe:
        """The answer's probe; without an answer that of the easiest value that was tried."""
        if self.answer is None:
            return self.probes[0 if self.find == "rate" else -1]
        return next(probe for probe in self.probes if probe.value == self.answer)

    @property
    def exceptions(self) -> tuple[Probe, ...]:
        """Probes that missed at an easier value than the answer: more was not better. None where all easier ones met."""
        if self.answer is None:
            return ()
        sign = 1 if self.find == "rate" else -1
        return tuple(probe for probe in self.probes if not probe.met and sign * (self.answer - probe.value) > 0)

    def scenario_at(self, value: Value) -> Scenario:
        """What was simulated at a value, with the first seed; of devices, what each replica is."""
        return _at(self.find, self.scenario, value)


class Progress(msgspec.Struct, frozen=True):
    """A search that is about to try a value, or has ended (None): its place among those that run, and the plan as far as it has come.

    That has no answer, and its probes stand as they were tried.
    """

    place: int
    plan: Plan
    value: Value | None


Watching = Callable[[Progress], object]


def highest_rate(
    scenario: Scenario, targets: Targets, *, seeds: int = 1, jobs: int = 1, tolerance: float | None = None
) -> Plan:
    """The highest rate at which the scenario's load meets the targets with every seed: its goodput, within 2 % unless said otherwise.

    Time is stretched (`Trace.scaled`). The search begins at the load's rate. Raises InvalidConfig for a load of which the rate changes nothing
    (a closed loop, all requests at once), for fewer than one seed or job, and for a tolerance that is none; and what scenarios raise.
    """
    (plan,) = plans("rate", [scenario], targets, seeds=seeds, jobs=jobs, tolerance=tolerance)
    return plan


def smallest_memory(
    scenario: Scenario, targets: Targets, *, seeds: int = 1, jobs: int = 1, tolerance: float | None = None
) -> Plan:
    """The fewest blocks with which the scenario's load meets the targets with every seed, within 1 % or one block unless said otherwise.

    The search begins at the scenario's blocks, and goes from what the longest request takes to what all requests take together. Raises
    InvalidConfig for fewer than one seed or job and for a tolerance that is none; and what scenarios raise.
    """
    (plan,) = plans("memory", [scenario], targets, seeds=seeds, jobs=jobs, tolerance=tolerance)
    return plan


def fewest_devices(scenario: Scenario, targets: Targets, *, seeds: int = 1, jobs: int = 1) -> Plan:
    """The fewest replicas of the scenario's device (`tensor_parallel` of them each) that meet the targets together with every seed.

    Each is a pool and a scheduler of its own, and requests are dealt to them in turn, in order of arrival. Percentiles are over all requests. Raises
    InvalidConfig for a closed loop and for fewer than one seed or job; and what scenarios raise.
    """
    (plan,) = plans("devices", [scenario], targets, seeds=seeds, jobs=jobs)
    return plan


def plans(
    find: Find,
    scenarios: Sequence[Scenario],
    targets: Targets,
    *,
    seeds: int = 1,
    jobs: int = 1,
    tolerance: float | None = None,
    watch: Watching | None = None,
) -> list[Plan]:
    """A plan for each scenario, in `jobs` processes: the same plans, whatever their number. `watch` is called before each probe and after the last.

    Raises what `highest_rate`, `smallest_memory` and `fewest_devices` raise, before the first simulation as far as that can be.
    """
    if seeds < 1:
        raise InvalidConfig(f"{seeds} seeds were asked for; at least 1 is needed")
    if find not in TOLERANCES:
        raise InvalidConfig(f'"{find}" cannot be sought. Known are {", ".join(TOLERANCES)}')
    share = TOLERANCES[find] if tolerance is None else tolerance
    if not (0 < share < 1 or (share == 0 and find != "rate")):
        raise InvalidConfig(f"the tolerance is {share}; it must be a share between 0 and 1")
    try:
        begun = [
            _Sought(find, scenario, targets, seeds, share, place, watch or (lambda _: None))
            for place, scenario in enumerate(scenarios)
        ]
        if find != "devices":
            # One trial at a time needs no process beside this one.
            jobs = min(jobs, max(1, len(scenarios) * seeds))
        return driven([sought.search() for sought in begun], jobs=jobs)
    finally:
        # A file may be another one when the next plan is asked for.
        trace_of.cache_clear()


class _Sought:
    """A search over one scenario. Raises what is wrong with it, before anything is simulated."""

    def __init__(
        self,
        find: Find,
        scenario: Scenario,
        targets: Targets,
        seeds: int,
        tolerance: float,
        place: int,
        watch: Watching,
    ) -> None:
        if find != "memory" and scenario.load.clients is not None:
            raise InvalidConfig(
                f"clients is {scenario.load.clients}: a closed loop has no rate, and is not dealt to replicas; leave clients out"
            )
        scenario.scheduler()
        self.find, self.scenario, self.targets, self.tolerance = find, scenario, targets, tolerance
        self._loads = [_with_seed(scenario, seed) for seed in range(scenario.load.seed, scenario.load.seed + seeds)]
        self._traces = [trace_of(seeded.load) for seeded in self._loads]
        if find == "rate" and self._arrivals_per_s() is None:
            raise InvalidConfig(f"all {len(self._traces[0]):,} requests arrive at once; no rate changes that")
        self._axis = self._axis_of()
        self._place, self._watch = place, watch

    def search(self) -> Search[Plan]:
        """To be driven."""
        tries, probes = search(self._axis), list[Probe]()
        answer = missed = None
        try:
            value = next(tries)
            while True:
                probe = yield from self._probed(value, probes, gives_up=True)
                probes.append(probe)
                if self.find != "memory" and {miss.promise for miss in probe.misses} & {"rejected", "cut_off"}:
                    # The pool is too small for a request, which no rate and no second pool of that size changes.
                    break
                value = tries.send(probe.met)
        except StopIteration as end:
            answer, missed = end.value
        probes.sort(key=lambda probe: probe.value)
        if answer is None:
            # By how much the best one misses is known only at its end.
            easiest = 0 if self.find == "rate" else -1
            if probes[easiest].p99 is None:
                probes[easiest] = yield from self._probed(probes[easiest].value, probes, gives_up=False)
        self._tell(None, probes)
        return self._plan(answer, missed, probes)

    def _tell(self, value: Value | None, probes: Sequence[Probe]) -> None:
        self._watch(Progress(self._place, self._plan(None, None, probes), value))

    def _probed(self, value: Value, probes: Sequence[Probe], *, gives_up: bool) -> Generator[Round, list[Tally], Probe]:
        self._tell(value, probes)
        replicas = int(value) if self.find == "devices" else 1
        targets = self.targets if gives_up else None
        trials = tuple(
            Trial(scenario=_at(self.find, seeded, value), replica=replica, replicas=replicas, targets=targets)
            for seeded in self._loads
            for replica in range(replicas)
        )
        asked = Round(value, replicas, self.targets, trials)
        return asked.probe((yield asked))

    def _axis_of(self) -> Axis:
        if self.find == "rate":
            return Rates(self.scenario.load.rate, self.tolerance)
        if self.find == "devices":
            return Counts(1, 1, min(map(len, self._traces)))
        fewest = max(_blocks_of_longest(self.scenario, trace) for trace in self._traces)
        most = max(_blocks_of_all(self.scenario, trace) for trace in self._traces)
        start = min(max(self.scenario.num_blocks(), fewest), most)
        return Counts(start, fewest, most, self.tolerance, turns=True)

    def _arrivals_per_s(self) -> float | None:
        trace, load = self._traces[0], self.scenario.load
        span = float(trace.arrival_s[-1]) * load.rate
        return len(trace) / span if span and load.clients is None else None

    def _plan(self, answer: Value | None, missed: Value | None, probes: Sequence[Probe]) -> Plan:
        roofline, trace = self.scenario.device.roofline(), self._traces[0]
        return Plan(
            find=self.find,
            scenario=self.scenario,
            targets=self.targets,
            seeds=len(self._loads),
            tolerance=self.tolerance,
            answer=answer,
            missed=missed,
            probes=tuple(probes),
            requests=len(trace) + trace.num_left_out,
            left_out=trace.num_left_out,
            arrivals_per_s=self._arrivals_per_s(),
            num_blocks=self.scenario.num_blocks(),
            kv_bytes=None if roofline is None else self.scenario.block_size * roofline.kv_bytes_per_token_of_device,
        )


def _at(find: Find, scenario: Scenario, value: Value) -> Scenario:
    if find == "rate":
        return msgspec.structs.replace(scenario, load=msgspec.structs.replace(scenario.load, rate=value))
    return msgspec.structs.replace(scenario, blocks=int(value)) if find == "memory" else scenario


def _with_seed(scenario: Scenario, seed: int) -> Scenario:
    return msgspec.structs.replace(scenario, load=msgspec.structs.replace(scenario.load, seed=seed))


def _blocks_of_longest(scenario: Scenario, trace: Trace) -> int:
    """What the longest request takes: in a pool of fewer it is rejected, or its output cut off."""
    return -(-int((trace.prompt_tokens + trace.output_tokens).max()) // scenario.block_size)


def _blocks_of_all(scenario: Scenario, trace: Trace) -> int:
    """What all requests take together at the length that they declare, or all rows at the context's in regions of a power of two.

    With so many nobody waits for memory, and nothing cached is ever evicted.
    """
    lengths = trace.prompt_tokens + np.maximum(trace.output_tokens, trace.max_tokens)
    each = -(-lengths // scenario.block_size)
    longest = max(int(each.max()), -(-(scenario.load.context or 0) // scenario.block_size))
    return max(int(each.sum()), 2 * longest * min(len(trace), scenario.max_sequences))
