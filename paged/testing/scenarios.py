"""Failures of the field as ready scenarios, made small: each hung, leaked, crashed or crossed tenants somewhere.

    run_scenario("abort in every state", build)          # one of them on your scheduler; raises Violation
    for name in SCENARIOS: run_scenario(name, build)     # all

A scenario is data: worlds, calls of a `SchedulerRig`, and what has to hold beside all that the rig holds against the
scheduler anyway. A few were planted here: random programs hardly ever reach them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paged.errors import InvalidConfig
from paged.scheduler import Request
from paged.testing.protocol import Capabilities
from paged.testing.reserving import DRAWN, IN_REGIONS
from paged.testing.saved import kept
from paged.testing.scheduler_rig import SchedulerRig
from paged.testing.violation import Call, Violation
from paged.testing.world import Builder, World, build_scheduler


@dataclass(frozen=True)
class Scenario:
    """Calls that are made in each of several worlds, after which everything has to end.

    source            where it went wrong
    holds             what has to hold, in words
    worlds, calls     what a SchedulerRig is built from, and what is done with it
    counts            how many requests have to be in which state at the end
    most_steps        within which everything has to end once the calls are made; None: the rig's own bound
    most_preemptions  of one request; None: any number
    needs             fields of Capabilities without which it makes no sense
    """

    source: str
    holds: str
    worlds: tuple[World, ...]
    calls: tuple[Call, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    most_steps: int | None = None
    most_preemptions: int | None = None
    needs: tuple[str, ...] = ()


def run_scenario(
    scenario: str | Scenario, build: Builder = build_scheduler, *, capabilities: Capabilities | None = None
) -> int:
    """Run one on the schedulers that `build` makes, one for each of its worlds. Returns how many it ran in: 0 where it
    needs what `capabilities` (None: everything) says is not there.

    Raises InvalidConfig for a name that is not in SCENARIOS, and Violation, with a program that can be saved and run
    again. PAGED_FAILURES saves it, as in `run_machine`.
    """
    chosen = SCENARIOS.get(scenario) if isinstance(scenario, str) else scenario
    if chosen is None:
        raise InvalidConfig(f"{scenario!r} is no scenario; {', '.join(map(repr, SCENARIOS))} are.")
    if capabilities is not None and not all(getattr(capabilities, name) for name in chosen.needs):
        return 0
    with kept(build):
        for world in chosen.worlds:
            _run(chosen, world, build)
    return len(chosen.worlds)


def _run(scenario: Scenario, world: World, build: Builder) -> None:
    rig = SchedulerRig(world, build)
    for verb, arguments in scenario.calls:
        getattr(rig, verb)(*arguments)
    steps = 0
    if scenario.most_steps is None:
        rig.drain()
    while rig.has_work and steps < (scenario.most_steps or 0):
        rig.step()
        steps += 1
    counts, most = rig.scheduler.counts(), rig.figures.max_preemptions
    found = [f"{scenario.holds} After {steps} steps: {counts}"] if rig.has_work else []
    if any(counts[name] != number for name, number in scenario.counts.items()):
        found.append(f"{scenario.holds} At the end {counts}, not {dict(scenario.counts)}")
    if scenario.most_preemptions is not None and most > scenario.most_preemptions:
        found.append(f"{scenario.holds} One request was preempted {most} times, at most {scenario.most_preemptions}")
    if found:
        raise Violation(found, rig.program)
    rig.drain()


def _request(id: str, first: int, num_tokens: int, max_tokens: int, **more: Any) -> Call:
    """Add a request whose prompt is so many rising tokens, from `first` on."""
    return "add", (Request(id=id, prompt=list(range(first, first + num_tokens)), max_tokens=max_tokens, **more),)


def _policies(world: World, *names: str) -> tuple[World, ...]:
    return tuple(replace(world, policy=name) for name in names)


def _churn(num_requests: int, seed: int) -> tuple[Call, ...]:
    """Requests that come and go: their prompts begin alike, every fifth is aborted, and some steps are taken back."""
    chance, calls = random.Random(seed), list[Call]()
    for number in range(num_requests):
        prompt = [chance.randrange(3) for _ in range(chance.randint(1, 12))]
        request = Request(id=f"r{number}", prompt=prompt, max_tokens=chance.randint(1, 6), eos_token_id=2)
        calls.append(("add", (request,)))
        calls += [("step", ((),))] * chance.randint(0, 3)
        if chance.random() < 0.2:
            calls.append(("abort", (f"r{chance.randint(max(0, number - 6), number)}",)))
        if chance.random() < 0.1:
            calls += [("schedule", ()), ("cancel", (chance.random() < 0.5,))]
    return tuple(calls)


_IN_BLOCKS = tuple(name for name in dict.fromkeys(DRAWN) if name not in IN_REGIONS)
# Those that let requests in while others run.
_CONTINUOUS = tuple(name for name in _IN_BLOCKS if name != "static")
_STEP: Call = ("step", ((),))
_BATCH: tuple[Call, ...] = (("schedule", ()), ("update", ((),)))
_ABORTS: tuple[Call, ...] = (
    *(_request("waiting", 0, 4, 8), ("abort", ("waiting",))),
    *(_request("mid-chunk", 10, 30, 8), _STEP, ("abort", ("mid-chunk",))),
    *(_request("running", 50, 4, 8), _STEP, ("abort", ("running",))),
    *(_request("finished", 60, 4, 1), _STEP, ("abort", ("finished",))),
    *(_request("twice", 70, 4, 8), ("abort", ("twice",)), ("abort", ("twice",))),
    ("abort", ("unknown",)),
    *(_request("in flight", 80, 4, 8), ("schedule", ()), ("abort", ("in flight",)), ("update", ((),))),
)

SCENARIOS: dict[str, Scenario] = {
    "content leaves while copies wait": Scenario(
        source="planted here: content left the device although copies waited",
        holds="While the copies of a step that failed are still to run, nothing else is copied to where they write.",
        worlds=tuple(
            World(num_blocks=6, block_size=1, host_blocks=host_blocks, host_caching=True, vocabulary=16)
            for host_blocks in (1, 2, 3)
        ),
        calls=(
            *(_request("first", 0, 3, 1), _request("goes on", 3, 1, 6), _STEP, ("schedule", ())),
            *(_request("takes room", 4, 2, 1), ("schedule", ()), ("cancel", (False,)), ("update", ((),))),
            *(_BATCH * 2),
        ),
        counts={"finished": 3},
        needs=("host_content", "cancel"),
    ),
    "a fork while copies wait": Scenario(
        source="planted here: a fork drove content out although copies waited",
        holds="What a fork drives out is not copied to where the copies of a step that failed still have to read.",
        worlds=(World(num_blocks=6, block_size=2, host_blocks=1, host_caching=True, max_sequences=8, vocabulary=16),),
        calls=(
            *(("add", (Request(id="forks", prompt=[4] * 3, max_tokens=9),)), ("schedule", ()), ("update", ((0,),))),
            *(("add", (Request(id="first", prompt=[1] * 3, max_tokens=1),)), *_BATCH),
            *(_request("takes room", 5, 7, 1), *_BATCH),
            *(
                ("add", (Request(id="comes back", prompt=[1, 1, 3], max_tokens=1),)),
                ("schedule", ()),
                ("cancel", (False,)),
            ),
            *(("fork", ("forks",)), ("fork", ("forks",)), *_BATCH * 2),
        ),
        counts={"finished": 4},
        needs=("host_content", "cancel", "fork", "drafts", "append"),
    ),
    "two prompts fill the pool": Scenario(
        source="vLLM #57104",
        holds="Requests of 4 + 1 and 3 + 1 blocks in 7 blocks both finish.",
        worlds=_policies(World(num_blocks=7, block_size=4, max_tokens_per_step=64, vocabulary=64), *_IN_BLOCKS),
        calls=(_request("four", 0, 16, 4), _request("three", 20, 12, 4)),
        counts={"finished": 2},
        most_steps=60,
    ),
    "a large prompt is mostly computed elsewhere": Scenario(
        source="vLLM #57841, where it took 34 steps after the fix",
        holds="A prompt whose KV exists elsewhere gets in between two others, and all three finish.",
        worlds=_policies(World(num_blocks=270, block_size=16, max_tokens_per_step=2048, vocabulary=6000), *_CONTINUOUS),
        calls=(
            _request("long", 0, 1600, 16),
            _request("loaded", 1600, 4080, 16, num_computed=4000),
            _request("short", 5680, 160, 16),
        ),
        counts={"finished": 3},
        most_steps=100,
        needs=("external_tokens",),
    ),
    "a prompt over the pool": Scenario(
        source="vLLM #39734",
        holds="A prompt that is longer than the pool, though not than the model, is refused and does not wait.",
        worlds=_policies(
            World(num_blocks=8, block_size=4, max_model_len=1000, vocabulary=256), *_IN_BLOCKS, *IN_REGIONS
        ),
        calls=(_request("before", 0, 8, 2), _request("over", 20, 40, 2), _request("after", 80, 8, 2)),
        counts={"finished": 2, "rejected": 1},
        most_steps=20,
    ),
    "hundreds of requests": Scenario(
        source="imp #1115; `soak` runs as many as one likes",
        holds="After many requests, aborts and failed steps, every block is free or cached.",
        worlds=(World(num_blocks=16, block_size=2, host_blocks=8, max_tokens_per_step=16, max_sequences=6),),
        calls=_churn(400, seed=7),
        needs=("cancel",),
    ),
    "less and less memory": Scenario(
        source="BLIS H8",
        holds="With less memory everything takes longer, never for ever.",
        worlds=tuple(
            world
            for num_blocks in (48, 38, 30, 24, 19, 15, 12, 10, 8)
            for world in _policies(
                World(num_blocks=num_blocks, block_size=4, max_tokens_per_step=64, max_sequences=6, vocabulary=256),
                *_CONTINUOUS,
            )
        ),
        calls=tuple(_request(f"r{number}", 25 * number, 20, 10) for number in range(6)),
        counts={"finished": 6},
        # One after the other would be six times one prefill and nine decodes.
        most_steps=60,
        most_preemptions=12,
    ),
    "abort in every state": Scenario(
        source="vLLM #18485, #25067, #49146",
        holds="An abort works in every state, and leaves nothing behind.",
        worlds=_policies(
            World(num_blocks=12, block_size=4, host_blocks=12, max_tokens_per_step=16, max_sequences=3, vocabulary=128),
            *_IN_BLOCKS,
        ),
        calls=_ABORTS,
        counts={"finished": 1, "aborted": 5},
    ),
    "abort while loading": Scenario(
        source="vLLM #25067",
        holds="Who waits for KV from elsewhere can be aborted.",
        worlds=(World(num_blocks=12, block_size=4, max_tokens_per_step=16, vocabulary=128),),
        calls=(_request("loading", 0, 12, 8, num_computed=8), *_BATCH, ("abort", ("loading",))),
        counts={"aborted": 1},
        needs=("external_tokens",),
    ),
    "abort after a preemption": Scenario(
        source="vLLM #49146",
        holds="Who was preempted, dropped or swapped, can be aborted, and gives back what it holds in either tier.",
        worlds=tuple(
            replace(world, host_blocks=host_blocks)
            for host_blocks in (0, 12)
            for world in _policies(
                World(num_blocks=6, block_size=4, max_tokens_per_step=64, vocabulary=128), "vllm", "paged"
            )
        ),
        calls=(
            *(_request("a", 0, 12, 12), _request("b", 20, 12, 12), _STEP, _STEP, ("abort", ("b",)), ("abort", ("a",))),
        ),
        counts={"aborted": 2},
    ),
    "tenants of the same spelling": Scenario(
        source="vLLM #44701, CVE-2025-46570",
        holds="A salt and an adapter of the same spelling share nothing.",
        worlds=(World(num_blocks=20, block_size=4, max_tokens_per_step=64, vocabulary=64),),
        calls=tuple(
            call
            for number, fields in enumerate(
                ({"salt": "x"}, {"adapter": "x"}, {"extra_key": "x"}, {"salt": "y"}, {}, {"salt": "x"})
            )
            for call in (_request(f"r{number}", 0, 13, 2, **fields), _STEP, _STEP)
        ),
        counts={"finished": 6},
        needs=("prefix_cache",),
    ),
}
"""Name → scenario."""
