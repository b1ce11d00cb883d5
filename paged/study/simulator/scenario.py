"""A simulation as data: trace, memory, policy and cost model. A study varies it, and it crosses processes."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged import POLICIES, BlockManager, LayerGroup, Policy, Scheduler
from paged.base.fields import converted
from paged.block_manager import Layout
from paged.errors import InvalidConfig, UnknownPolicy
from paged.study.hardware import (
    CostModel,
    Faster,
    Profile,
    Roofline,
    StepWork,
    device_named,
    is_path,
    model_named,
    suiting_budget,
)
from paged.study.hardware.device import link_of
from paged.study.hardware.measured import holds_kernels, layers_in, step_from, step_of, timed_by
from paged.study.hardware.measured_step import MeasuredStep
from paged.study.hardware.step_work import StepTime
from paged.study.limits import NotNegative
from paged.study.simulator.ledger import UNBOUNDED, Timeline
from paged.study.simulator.replicas import Replicas, Routing
from paged.study.simulator.result import SimulationResult
from paged.study.simulator.simulation import Simulation
from paged.study.simulator.trace_facts import TraceFacts
from paged.study.traces import Trace, is_synthetic, open_trace

Budget = int | Literal["auto", "knee", "own"]
USUAL_BUDGET = 2048
"""The token budget without a model to choose it by."""
MOST_DRAWN = 100_000
"""The most requests to draw from a trace that is too short: more take minutes to simulate, and such a rate is far beyond one device."""
_TIMES, _LONG = 4, 0.99
"""A trace has to last so many residences of a long request, whose output is at this quantile."""
MOST_AT_ONCE = 8192
"""The most tokens of a step for whose activations memory is reserved."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The requests and their arrivals.

    trace         a file, an excerpt's name, or `synthetic:…`
    limit         only the first requests
    seed          of prompts' tokens, of the requests that `keep` keeps, and of synthetic arrivals
    rate          factor on the rate of arrivals (time is stretched)
    prompts, outputs
                  factors on lengths
    keep          share of the requests that stay, drawn by the seed: arrivals of a file that differ from seed to seed
    half          "first" or "second" half of the requests; None: all
    context       longer requests are clipped or rejected (`over_long`); None: no limit
    declared      a request declares as `max_tokens` what the context leaves, at most this; None: exactly its output
    clients       of a closed loop; None: the trace's arrivals
    resampled     the requests are drawn from the file's by the seed, in blocks (`Trace.resampled`)
    least_span_s  if all come in less at this rate, more are drawn in the same way, at the same rate; None: no more are drawn
    """

    trace: str
    limit: int | None = None
    seed: int = 0
    rate: float = 1.0
    prompts: float = 1.0
    outputs: float = 1.0
    half: Literal["first", "second"] | None = None
    keep: float = 1.0
    context: int | None = None
    over_long: Literal["clip", "reject"] = "reject"
    declared: int | None = None
    clients: int | None = None
    resampled: bool = False
    least_span_s: float | None = None

    def build(self) -> Trace:
        """Build the trace. Raises TraceError, OSError or InvalidConfig."""
        converted("least_span_s", self.least_span_s, NotNegative | None)
        trace = open_trace(self.trace, limit=self.limit, seed=self.seed)
        if self.half is not None:
            trace = trace.halves()[0 if self.half == "first" else 1]
        rate, span = self.rate, float(trace.arrival_s[-1])
        times = max(1.0, (self.least_span_s or 0.0) * rate / span) if span else 1.0
        if times > 1:
            count = len(trace)
            wanted = min(math.ceil(count * times), max(count, MOST_DRAWN))
            trace = trace.resampled(seed=self.seed, requests=wanted)
            # The drawn requests come a little faster or slower than the trace's.
            rate *= float(trace.arrival_s[-1]) / span * count / wanted
        elif self.resampled:
            trace = trace.resampled(seed=self.seed)
        if self.keep != 1.0:
            trace = trace.thinned(self.keep, seed=self.seed)
        if (rate, self.prompts, self.outputs) != (1.0, 1.0, 1.0):
            trace = trace.scaled(rate=rate, prompts=self.prompts, outputs=self.outputs)
        if self.context is not None:
            trace = trace.fitted(self.context, how=self.over_long)
        if self.declared is not None:
            if self.context is None:
                raise InvalidConfig("declared maxima need a context, which they may not exceed; it is None")
            trace = trace.declared(self.context, self.declared)
        return trace

    def seeded(self, number: int) -> "Load":
        """Return the load with its seed raised by `number`; 0 is the load itself.

        Then a synthetic trace draws anew, and so does `keep`; a whole file is resampled from itself.
        """
        is_file = self.keep == 1.0 and not is_synthetic(self.trace)
        resampled = self.resampled or (number > 0 and is_file)
        return msgspec.structs.replace(self, seed=self.seed + number, resampled=resampled)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The source of a step's seconds, and of the number of blocks: a model on a device, a profile of timed steps, or a formula.

    model, device    names, or paths of JSON files (docs/hardware.md); both or neither
    dtype, kv_dtype, kv_dtype_skip_layers, quantization, quantize_head, tensor_parallel
                     as in `Placement`
    link_gbps, link_us
                     rate of the devices' link in 10⁹ bytes/s one way, and µs a message; None: as in `usual_link`
    memory_share     of the device's memory that may be used
    profile          a file that `paged profile` wrote, of steps or of kernels, in place of shipped tables
    formula          the step's time without a model
    published        published figures time steps, even if the device's kernels were measured
    faster           factors of a hypothetical device; not with a profile of steps or a formula
    """

    model: str | None = None
    device: str | None = None
    dtype: str = "bf16"
    kv_dtype: str | None = None
    kv_dtype_skip_layers: tuple[str, ...] = ()
    quantization: str | None = None
    quantize_head: bool = False
    tensor_parallel: int = 1
    link_gbps: float | None = None
    link_us: float | None = None
    memory_share: float = 0.9
    profile: str | None = None
    formula: StepTime = StepTime()
    published: bool = False
    faster: Faster = Faster()

    @property
    def can_be_faster(self) -> bool:
        """Whether steps are timed by a device's rates, and not by a profile of steps or a formula."""
        return self.model is not None and (self.profile is None or holds_kernels(self.profile))

    def groups(self, block_size: int) -> Sequence[LayerGroup]:
        """Return the kinds of layers of the model's plan; without a plan, a block is of all layers."""
        roofline = self.roofline()
        plan = None if roofline is None else roofline.plan(block_size)
        return [LayerGroup(each.kind, each.reach, each.pages) for each in plan.groups] if plan else [LayerGroup("full")]

    def cost_model(self) -> CostModel:
        """Make the cost model. Raises InvalidConfig, UnknownModel, UnknownDevice, and for a profile BadHardwareFile or OSError."""
        if self.faster != Faster() and not self.can_be_faster:
            raise InvalidConfig(
                f"a {'formula' if self.profile is None else 'profile'} has no rates that could be others; faster is {self.faster}"
            )
        roofline = self.roofline()
        if self.profile is not None and holds_kernels(self.profile):
            if roofline is None:
                raise InvalidConfig(
                    f"{self.profile} holds kernels of a device; a model and that device are needed beside it"
                )
            return step_from(layers_in(self.profile, roofline), roofline)
        if self.profile is not None:
            profile = Profile.load(self.profile)
            if roofline is not None:
                profile.must_be_of(roofline.model)
            if self.tensor_parallel != 1:
                raise InvalidConfig(
                    f"a profile is of steps as they were timed; tensor_parallel is {self.tensor_parallel}"
                )
            return profile
        if roofline is not None:
            # Names of the catalogue are cached; files may change.
            is_shipped = not any(name is None or is_path(name) for name in (self.model, self.device))
            return _shipped_step(self) if is_shipped else step_of(roofline, published=self.published)
        return self.formula

    def timed_by(self) -> str:
        """Return the source of a step's seconds, in words. Raises what `cost_model` raises."""
        step = self.cost_model()
        if isinstance(step, MeasuredStep | Roofline):
            return timed_by(step, published=self.published)
        return f"the profile {self.profile}: {step.about}" if isinstance(step, Profile) else "a formula of four numbers"

    def notes(self) -> tuple[str, ...]:
        """Return what a reader of the figures should know: of dtypes, and the parts of a step's seconds that were not measured."""
        step, roofline = self.cost_model(), self.roofline()
        said = () if roofline is None else roofline.notes
        return said + (step.layers.notes if isinstance(step, MeasuredStep) else ())

    def not_modelled(self) -> tuple[str, ...]:
        """Return sentences on the parts of the model that no figure counts."""
        return () if self.model is None else model_named(self.model).not_modelled

    def codes(self) -> str | None:
        """Return the format of linear layers in codes, in words; None: they are floats."""
        roofline = self.roofline()
        return None if roofline is None or roofline.codes is None else roofline.codes.title

    def roofline(self) -> Roofline | None:
        """Return the roofline of the model on the device; None if neither is named."""
        if self.model is None or self.device is None:
            if self.model is not None:
                raise InvalidConfig(f"the model {self.model} needs a device beside it, h100 say")
            if self.device is not None:
                raise InvalidConfig(f"the device {self.device} needs a model beside it, llama-3-8b say")
            if (self.link_gbps, self.link_us) != (None, None):
                raise InvalidConfig("a link was named; a model and a device are needed beside it")
            return None
        device = device_named(self.device)
        same = set(self.__struct_fields__) & set(Roofline.__struct_fields__) - {"model", "device"}
        return Roofline(
            model=model_named(self.model),
            device=device,
            link=link_of(device, self.link_gbps, self.link_us),
            **{name: getattr(self, name) for name in same},
        )


@lru_cache(maxsize=64)
def _shipped_step(device: Device) -> MeasuredStep | Roofline:
    """Return the cost model of names in the catalogue. Simulations and plans read it many times, and each new one makes tables."""
    roofline = device.roofline()
    assert roofline is not None, "a model and a device are named"
    return step_of(roofline, published=device.published)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation.

    blocks               device blocks, or pages if the model's layers are of several kinds; None: those that fit beside the model
    max_tokens_per_step  token budget; "auto": one that suits model and device (`suiting_budget`), 2,048 without a model, and the policy's own for
                         a policy that does not split prompts; "knee": at the roofline's knee; "own": the policy's default, or the knee if it has
                         none. A policy that neither splits prompts nor has a budget (static, orca) has no bound
    price_per_hour       of a replica
    routing              the number of replicas, and the router among them
    """

    load: Load
    device: Device = Device()
    policy: str | Policy = "paged"
    blocks: int | None = None
    block_size: int = 16
    host_blocks: int = 0
    prefix_caching: bool = True
    max_tokens_per_step: Budget = "auto"
    max_sequences: int = 256
    price_per_hour: float | None = None
    routing: Routing = Routing()

    def budget(self) -> int:
        """Return the token budget. Raises UnknownPolicy, and InvalidConfig for the knee without a roofline."""
        policy, asked = self.policy_rules(), self.max_tokens_per_step
        if not policy.chunked and policy.default_budget is None:
            return UNBOUNDED
        is_own = asked == "own" or (asked == "auto" and not policy.chunked)
        if is_own and policy.default_budget is not None:
            return policy.default_budget
        if not isinstance(asked, str):
            return asked
        if asked == "auto":
            if self.device.model is None:
                return USUAL_BUDGET
            return suiting_budget(
                self.device.cost_model(), max_sequences=self.max_sequences, block_size=self.block_size
            )
        roofline = self.device.roofline()
        if roofline is None:
            raise InvalidConfig(
                f'the token budget "{asked}" of {policy.name} is at the knee, which needs a model and a device'
            )
        # A whole number of blocks: a chunk that ends inside a block cannot share that block.
        return max(1, round(roofline.knee_tokens / self.block_size)) * self.block_size

    def policy_rules(self) -> Policy:
        """Return the policy. Raises UnknownPolicy for an unknown name."""
        if isinstance(self.policy, Policy):
            return self.policy
        if self.policy not in POLICIES:
            raise UnknownPolicy(self.policy, POLICIES)
        return POLICIES[self.policy]

    def num_blocks(self) -> int:
        """Return the device blocks, or pages. Raises BudgetTooSmall, and InvalidConfig if neither blocks nor a device are named."""
        if self.blocks is not None:
            return self.blocks
        roofline = self.device.roofline()
        if roofline is None:
            raise InvalidConfig("the number of blocks is needed, or a model and a device to take it from")
        return roofline.num_blocks(
            self.block_size,
            self.device.memory_share,
            max_tokens_per_step=min(self.budget(), MOST_AT_ONCE),
            max_sequences=self.max_sequences,
        )

    def settles_in_s(self, trace: Trace) -> float:
        """Return the seconds that the load's trace has to last, in two figures: four times the decoding of a request with the 99th percentile of outputs,
        beside as many others as run at once. 0 in a closed loop, and if all requests come at once: they have no rate."""
        if self.load.clients is not None or not trace.arrival_s[-1]:
            return 0.0
        length = max(1, int(trace.prompt_tokens.mean() + trace.output_tokens.mean() / 2))
        rows, cost_model = self.rows_at(length), self.device.cost_model()
        decoding = StepWork.of_rows([1] * rows, [length] * rows, sampled_rows=rows, spans=cost_model.spans)
        needed = _TIMES * float(cost_model.seconds(decoding)) * float(np.quantile(trace.output_tokens, _LONG))
        if needed <= 0:
            return 0.0
        digit = 10.0 ** (math.floor(math.log10(needed)) - 1)
        return float(f"{math.ceil(needed / digit) * digit:.6g}")

    def layout(self) -> Layout:
        """Return the kinds of layers and their pages."""
        return Layout(self.device.groups(self.block_size), self.block_size, keeps=self.prefix_caching)

    def rows_at(self, length: int) -> int:
        """Return how many sequences of so many tokens run at once, as memory and rows allow, at least one."""
        layout, num_blocks = self.layout(), self.num_blocks()
        held = num_blocks * self.block_size // length if layout.is_plain else num_blocks // layout.pages_for(length)
        return max(1, min(self.max_sequences, held))

    def settled(self) -> "Scenario":
        """Return the scenario with a trace that lasts long enough at its rate, unless the load has a `least_span_s`."""
        needed = 0.0 if self.load.least_span_s is not None else self.settles_in_s(self.load.build())
        if not needed:
            return self
        return msgspec.structs.replace(self, load=msgspec.structs.replace(self.load, least_span_s=needed))

    def scheduler(self) -> Scheduler:
        """Make a scheduler on an empty pool. Raises InvalidConfig, UnknownPolicy or what names raise."""
        costs = self.device.cost_model().costs(self.block_size)
        if self.host_blocks and self.device.profile is not None and not costs.seconds_per_swapped_block:
            raise InvalidConfig(
                f"{self.device.profile} has no price for tokens that move to the host, so swapping would be free; host_blocks "
                f"is {self.host_blocks:,}. Take it again with a host, or simulate without one"
            )
        layout = self.layout()
        if self.host_blocks:
            # Copies are priced by block, not by page.
            layout.refuse("a simulated host tier (host_blocks)")
        manager = BlockManager(
            self.num_blocks(),
            self.block_size,
            host_blocks=self.host_blocks,
            prefix_caching=self.prefix_caching,
            groups=layout.groups,
        )
        return Scheduler(
            manager,
            policy=self.policy,
            max_tokens_per_step=self.budget(),
            max_sequences=self.max_sequences,
            max_model_len=self.load.context,
            costs=costs,
        )

    def simulation(self, *, check: bool = False, trace: Trace | None = None) -> Simulation:
        """Make the simulation of one replica. `trace` replaces the load's, such as by a part of it. Raises what its parts raise, and InvalidConfig for
        several replicas."""
        if self.routing.replicas != 1:
            raise InvalidConfig(f"one replica is simulated here; replicas is {self.routing.replicas}")
        return Simulation(
            self.load.build() if trace is None else trace,
            self.scheduler(),
            self.device.cost_model(),
            check=check,
            clients=self.load.clients,
            price_per_hour=self.price_per_hour,
        )

    def started(self, *, check: bool = False) -> Simulation | Replicas:
        """Make the simulation of one replica, or of all. Raises what its parts raise."""
        if self.routing.replicas == 1:
            return self.simulation(check=check)
        return Replicas(
            self.load.build(),
            [self.scheduler() for _ in range(self.routing.replicas)],
            self.device.cost_model(),
            self.routing,
            check=check,
            clients=self.load.clients,
            price_per_hour=self.price_per_hour,
        )


def prompts_over_budget(scenario: Scenario, trace: Trace) -> int:
    """Return the number of prompts longer than the token budget of a policy that does not split prompts: each is computed alone, over several steps."""
    if scenario.policy_rules().chunked:
        return 0
    return int((trace.prompt_tokens > scenario.budget()).sum())


def facts_of(scenario: Scenario, trace: Trace) -> TraceFacts:
    """Return the facts of the scenario's trace."""
    is_open = scenario.load.clients is None
    return TraceFacts.of(trace, is_open=is_open, settles_in_s=scenario.settles_in_s(trace))


class Outcome(msgspec.Struct, frozen=True):
    """A scenario and its result.

    timeline  columns by name, float64 [entries] each (`Timeline.columns`); no entries for several replicas
    ttft_s, longest_gap_s, e2e_s
              float64 [requests], NaN for requests without one
    applied   the changes to the trace, a sentence each
    load      the facts of the trace
    prompts_over_budget
              prompts longer than the token budget of a policy that does not split them
    """

    scenario: Scenario
    result: SimulationResult
    timeline: dict[str, NDArray[np.float64]]
    ttft_s: NDArray[np.float64]
    longest_gap_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    applied: tuple[str, ...]
    load: TraceFacts
    prompts_over_budget: int


def outcome_of(scenario: Scenario, simulation: Simulation | Replicas) -> Outcome:
    """Return the outcome of a simulation that has run."""
    latencies = simulation.latencies
    timeline = simulation.timeline if isinstance(simulation, Simulation) else Timeline()
    return Outcome(
        scenario,
        simulation.result(),
        timeline.columns(),
        latencies.ttft,
        latencies.longest_gap,
        latencies.e2e,
        tuple(map(str, simulation.trace.applied)),
        facts_of(scenario, simulation.trace),
        prompts_over_budget(scenario, simulation.trace),
    )


def run(scenario: Scenario, *, check: bool = False) -> Outcome:
    """Simulate a scenario to its end. Raises what its parts raise, and SimulationStuck."""
    simulation = scenario.started(check=check)
    simulation.run()
    return outcome_of(scenario, simulation)
