"""Programs of either rig are run again, and made short as long as they fail."""

import pytest

from paged import BlockManager, Request
from paged.block_manager import TierView
from paged.errors import InvalidConfig
from paged.testing import (
    EngineRequest,
    EngineWorld,
    ManagerRig,
    ManagerWorld,
    StandInEngine,
    Violation,
    World,
    random_program,
    replay,
    shrink,
)
from paged.testing.machines import ManagerMachine, run_machine
from paged.testing.violation import Program
from paged.testing.world import build_scheduler

WORLD = ManagerWorld(num_blocks=6, block_size=2)


class LeaksOnFree(BlockManager):
    """Whoever ends leaves a reference to its second block."""

    def free(self, rows):
        for row in rows:
            self._memory.device.keep(self.table(row)[1:2])
        super().free(rows)


class Crashes(BlockManager):
    """Cannot be told the same prompt twice."""

    def add(self, tokens, *, namespace=None):
        if self.rows.live.size > 1:
            raise KeyError("no third row")
        return super().add(tokens, namespace=namespace)


def builder_of(kind):
    return lambda world: kind(world.num_blocks, world.block_size, prefix_caching=world.prefix_caching)


PROGRAM = [
    ("add", ([1, 0, 1, 0, 1], None)),
    ("allocate", ([0], [2])),
    ("add", ([0, 0, 0], ("a",))),
    ("seal", ()),
    ("allocate", ([1], [3])),
    ("confirm", ()),
    ("confirm", ()),
    ("append", (1, [1, 1])),
    ("misuse", ("free", [1, 77])),
    ("fork", (1,)),
    ("free", ([0],)),
    ("free", ([1, 2],)),
]


def test_a_program_of_a_manager_shrinks_to_the_calls_and_tokens_that_it_takes():
    with pytest.raises(Violation):
        replay(WORLD, PROGRAM, builder_of(LeaksOnFree))
    short = shrink(WORLD, PROGRAM, builder_of(LeaksOnFree))
    assert short.world == ManagerWorld(num_blocks=2, block_size=1)
    assert short.calls == (("add", ([0, 0], None)), ("allocate", ([0], [2])))


def test_a_program_that_breaks_no_rule_stays_as_it_is():
    assert shrink(WORLD, PROGRAM) == Program("ManagerRig", WORLD, tuple(PROGRAM))


def test_sizes_that_a_subject_refuses_are_no_smaller_world():
    def build(world):
        if world.num_blocks in (2, 3):
            raise InvalidConfig("as few blocks as that are not made here.")
        return builder_of(LeaksOnFree)(world)

    assert shrink(WORLD, PROGRAM, build).world == ManagerWorld(num_blocks=4, block_size=1)


def test_a_search_is_bounded_by_the_programs_that_it_may_run():
    none, some, all_ = (shrink(WORLD, PROGRAM, builder_of(LeaksOnFree), programs=most) for most in (0, 8, None))
    assert none.calls == tuple(PROGRAM)
    assert len(PROGRAM) > len(some.calls) > len(all_.calls)


def test_calls_that_a_long_program_does_not_need_are_cut_before_it_is_run_in_smaller_worlds():
    detour = [("add", ([0, 1], None)), ("free", ([0],))] * 60
    assert len(shrink(WORLD, detour + PROGRAM, builder_of(LeaksOnFree), programs=40).calls) < 12


def test_what_a_manager_raises_out_of_turn_is_a_violation_with_its_program():
    calls = [("add", ([0], None)), ("reset_cache", ()), ("add", ([1], None)), ("add", ([0, 1], None))]
    with pytest.raises(Violation, match=r"raised KeyError: 'no third row' \(add line \d+ < ") as caught:
        replay(WORLD, calls, builder_of(Crashes))
    assert caught.value.program.lines[-1] == "rig.add([0, 1], None)"
    assert shrink(WORLD, calls, builder_of(Crashes)).calls == (("add", ([0], None)),) * 3


def test_a_call_may_leave_out_what_has_a_default():
    calls = [("add", ([0, 1],)), ("allocate", ([0], [2])), ("confirm", ()), ("swap_out", ([0],)), ("swap_in", ([0],))]
    rig = replay(ManagerWorld(host_blocks=2), calls)
    assert [verb for verb, _ in rig.calls] == [verb for verb, _ in calls] and rig.events["swap in"] == 1


def test_calls_about_what_is_gone_are_left_out():
    gone = [
        *(("append", (3, [1])), ("allocate", ([3], [1])), ("extend_hit", (3,)), ("reserve", ([3], [2]))),
        *(("truncate", (3, 0)), ("free", ([3],)), ("fork", (3,)), ("swap_out", ([3], 0)), ("swap_in", ([3],))),
        *(("misuse", ("append", 3, [0])), ("misuse", ("confirm", [0]))),
    ]
    stay = [("add", ([0, 1], None)), ("allocate", ([0], [1]))]
    assert [verb for verb, _ in replay(WORLD, stay + gone).calls] == ["add", "allocate"]
    stay, gone = (
        [("add", (Request(id="a", prompt=[1]),))],
        [("append", ("b", [1], 0)), ("append", ("a", [1], 2)), ("run", (1,))],
    )
    assert [verb for verb, _ in replay(World(), stay + gone).calls] == ["add"]


def test_a_request_shrinks_to_the_usual_one():
    def build(world):
        scheduler = build_scheduler(world)
        scheduler.status = lambda id: "paused"
        return scheduler

    request = Request(
        id="a",
        prompt=[1, 0, 1, 2],
        max_tokens=5,
        min_tokens=2,
        salt="a",
        adapter="b",
        priority=1,
        extra_key=1,
        keep_at=(2,),
    )
    shorter = shrink(World(max_lead=3.0), [("schedule", ()), ("add", (request,)), ("step", ((2, 1),))], build)
    assert shorter.calls == (("add", (Request(id="a", prompt=[0], max_tokens=1),)),)
    assert shorter.world == World(num_blocks=1, max_tokens_per_step=32, max_sequences=8)


def test_a_request_to_an_engine_shrinks_too():
    class Stands(StandInEngine):
        """Computes nothing."""

        def step(self):
            return []

    request = EngineRequest(id="a", prompt=[1, 0, 1], max_tokens=3, temperature=1.5, seed=2, keeps=(1, None))
    shorter = shrink(EngineWorld(), [("add", (request,)), ("step", (2,))], Stands)
    assert shorter.calls == (("add", (EngineRequest(id="a", prompt=[0], max_tokens=1),)),)


@pytest.mark.parametrize("seed", range(3))
def test_a_program_that_runs_again_makes_the_same_decisions(seed):
    first = random_program(seed, 60)
    again = replay(first.world, first.calls)
    assert again.decisions == first.decisions and again.decisions


def test_the_machine_s_own_programs_replay_without_a_call_left_out():
    programs = []

    class Kept(ManagerMachine):
        def teardown(self):
            programs.append(self.rig.program)
            super().teardown()

    run_machine(Kept, few=5)
    for program in programs:
        assert replay(program.world, program.calls).calls == list(program.calls)
    assert ManagerRig.__name__ == programs[0].rig


def test_a_world_shrinks_with_the_prompts_that_fill_it():
    class NothingUsedWhenFull(TierView):
        @property
        def num_used(self):
            return super().num_used if self.num_free else 0

    class NeedsFull(BlockManager):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.device = NothingUsedWhenFull(self.device._pool)

    filled = [("add", ([0] * 6, None)), ("allocate", ([0], [6]))]
    short = shrink(ManagerWorld(num_blocks=3, block_size=2), filled, builder_of(NeedsFull))
    assert short.world == ManagerWorld(num_blocks=1, block_size=1) and short.calls[0] == ("add", ([0], None))
