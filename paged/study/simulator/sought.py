"""A search over one scenario: which value is tried next, and the plan that the tries come to."""

from collections.abc import Generator, Sequence

import msgspec
import numpy as np

from paged.errors import InvalidConfig
from paged.study.simulator.driver import Search
from paged.study.simulator.ledger import groups_of
from paged.study.simulator.plan import Find, Plan, Progress, Watching, scenario_at
from paged.study.simulator.probe import Probe, Round
from paged.study.simulator.scenario import Scenario, facts_of, prompts_over_budget
from paged.study.simulator.search import Axis, Counts, Rates, Value, search
from paged.study.simulator.targets import Targets
from paged.study.simulator.trial import Tally, Trial, trace_of
from paged.study.traces import Trace


class Sought:
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
        self.seeds = seeds
        self._seeded = [msgspec.structs.replace(scenario, load=scenario.load.seeded(number)) for number in range(seeds)]
        self._traces = [trace_of(seeded.load) for seeded in self._seeded]
        if find == "rate" and self._arrivals_per_s() is None:
            raise InvalidConfig(f"all {len(self._traces[0]):,} requests arrive at once; no rate changes that")
        self._axis = self._axis_of()
        self.place, self.watch = place, watch
        self._tried: dict[Value, Probe] = {}

    @property
    def trace(self) -> Trace:
        """Of the first seed."""
        return self._traces[0]

    def of(self, scenario: Scenario) -> "Sought":
        """The same for another scenario. Raises as for the first."""
        return Sought(self.find, scenario, self.targets, self.seeds, self.tolerance, self.place, self.watch)

    def judged(self, value: Value) -> Generator[Round, list[Tally], Probe]:
        """One value, tried: to be driven. It is not tried again by a search."""
        probe = yield from self._probed(value, (), gives_up=True)
        return probe

    def harder(self, answer: Value, share: float) -> Value:
        """A value that is harder than the answer by a share of it, or by one; the hardest there is where that is less."""
        if isinstance(self._axis, Rates):
            return float(f"{answer * (1 + share):.6g}")
        return max(self._axis.fewest, min(int(answer) - 1, int(answer * (1 - share))))

    def search(self, start: Value | None = None) -> Search[Plan]:
        """To be driven; from the scenario's own value, or from another one."""
        axis = self._axis if start is None else msgspec.structs.replace(self._axis, start=start)
        tries, probes = search(axis), list[Probe]()
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
        return self._plan(answer, missed, probes)

    def _probed(self, value: Value, probes: Sequence[Probe], *, gives_up: bool) -> Generator[Round, list[Tally], Probe]:
        known = self._tried.get(value)
        if known is not None and (gives_up or known.p99 is not None):
            return known
        self.watch(Progress(self.place, self._plan(None, None, probes), value))
        replicas = int(value) if self.find == "devices" else 1
        targets = self.targets if gives_up else None
        trials = tuple(
            Trial(scenario=scenario_at(self.find, seeded, value), replica=replica, replicas=replicas, targets=targets)
            for seeded in self._seeded
            for replica in range(replicas)
        )
        asked = Round(value, replicas, self.targets, trials)
        probe = self._tried[value] = asked.probe((yield asked))
        return probe

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
        roofline, trace = self.scenario.device.roofline(), self.trace
        return Plan(
            find=self.find,
            scenario=self.scenario,
            targets=self.targets,
            seeds=self.seeds,
            tolerance=self.tolerance,
            answer=answer,
            missed=missed,
            probes=tuple(probes),
            load=facts_of(self.scenario, trace),
            requests=len(trace) + trace.num_left_out,
            left_out=trace.num_left_out,
            prompts_over_budget=prompts_over_budget(self.scenario, trace),
            arrivals_per_s=self._arrivals_per_s(),
            num_blocks=self.scenario.num_blocks(),
            groups=groups_of(self.scenario.layout()),
            kv_bytes=None if roofline is None else roofline.page_bytes(self.scenario.block_size),
        )


def _blocks_of_longest(scenario: Scenario, trace: Trace) -> int:
    """What the longest request takes: in a pool of fewer it is rejected, or its output cut off."""
    layout = scenario.layout()
    return layout.pages_for(int((trace.prompt_tokens + trace.output_tokens).max())) + layout.spare_pages


def _blocks_of_all(scenario: Scenario, trace: Trace) -> int:
    """What all requests take together at the length that they declare, or all rows at the context's in regions of a power of two.

    With so many nobody waits for memory, and nothing cached is ever evicted.
    """
    lengths = trace.prompt_tokens + np.maximum(trace.output_tokens, trace.max_tokens)
    layout = scenario.layout()
    # What windows pass stays cached, so they count as full.
    each = -(-lengths // scenario.block_size) * layout.block_pages + layout.state_pages + layout.spare_pages
    longest = max(int(each.max()), layout.pages_for(scenario.load.context or 0))
    return max(int(each.sum()), 2 * longest * min(len(trace), scenario.max_sequences))
