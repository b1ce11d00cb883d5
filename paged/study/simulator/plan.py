"""A plan: the highest rate, the smallest memory or the fewest devices at which a trace meets its targets, and all that was tried."""

from collections.abc import Callable
from typing import Literal

import msgspec

from paged.study.simulator.scenario import Scenario
from paged.study.simulator.search import Value
from paged.study.simulator.targets import Probe, Targets
from paged.study.simulator.trace_facts import TraceFacts

Find = Literal["rate", "memory", "devices"]
TOLERANCES: dict[Find, float] = {"rate": 0.02, "memory": 0.01, "devices": 0.0}
"""How far, as a share, the answer may be from the nearest value that misses; counts that are neighbours are near enough in any case."""


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """Why a token budget was chosen, where none was named.

    first     what the cost model and the targets suggest: where the search began
    step_s    what a full step of so many tokens takes beside the decodes of a plausible batch, by the cost model
    limit_s   the most that it may take between two tokens; None: no target says
    against   budgets that were held against the answer, and whether each met where the one before it missed; rising
    """

    first: int
    step_s: float
    limit_s: float | None
    against: dict[int, bool]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was sought, what was tried, what was found.

    find            rate (times the load's own arrivals, as `Load.rate`), memory (blocks), or devices (replicas of the scenario's device)
    scenario        as it was asked; its rate or blocks is where the search began; a token budget that was weighed is a number
    weighed         how that number came about; None: the budget was named, or is the policy's own
    seeds           a value meets where it does with each of so many
    tolerance       a share of the answer
    answer          the hardest value that met; None: none did
    missed          the nearest harder value that missed; None: none was tried, because the answer is the last value there is
    probes          all that was tried, by rising value
    load            the trace of the first seed, at the scenario's rate
    requests        of the trace, of which `left_out` were longer than the context and are in no simulation
    prompts_over_budget
                    of a policy that splits none: prompts that are longer than the token budget
    arrivals_per_s  at rate 1, over the whole trace, of the first seed; None where all arrive at once, or a client waits for an answer
    num_blocks      of the scenario's pool, whatever is sought; pages of layers of several kinds
    groups          pages a block or a sequence of each kind of layer, in words; none where a block is of all layers
    kv_bytes        that a block, or page, takes of a device; None without a model
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

    @property
    def cost_per_hour(self) -> float | None:
        """Of the answer: the scenario's price per hour is that of a replica. None without an answer or a price."""
        price = self.scenario.price_per_hour
        if price is None or self.answer is None:
            return None
        return price * self.answer if self.find == "devices" else price

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Output tokens, as many an hour as the requests that arrive at the answer ask for. None without a rate of arrivals, too."""
        cost, per_s = self.cost_per_hour, self.load.per_s
        if cost is None or per_s is None or self.answer is None:
            return None
        if self.find == "rate":
            per_s *= self.answer / self.scenario.load.rate
        return cost / (per_s * 3600 * self.load.outputs.mean) * 1e6

    def scenario_at(self, value: Value) -> Scenario:
        """What was simulated at a value, with the first seed; of devices, what each replica is."""
        return scenario_at(self.find, self.scenario, value)


class Progress(msgspec.Struct, frozen=True):
    """A search that is about to try a value, or has ended (None): its place among those that run, and the plan as far as it has come.

    That has no answer, and its probes stand as they were tried.
    """

    place: int
    plan: Plan
    value: Value | None


Watching = Callable[[Progress], object]


def scenario_at(find: Find, scenario: Scenario, value: Value) -> Scenario:
    """What is simulated at a value; of devices, what each replica is."""
    if find == "rate":
        return msgspec.structs.replace(scenario, load=msgspec.structs.replace(scenario.load, rate=value))
    return msgspec.structs.replace(scenario, blocks=int(value)) if find == "memory" else scenario
