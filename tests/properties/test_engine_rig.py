"""Serving engines from outside: every answer is the one that its request gets alone, whatever else is asked, and whatever memory there is.

Ours runs a model of a few thousand weights, and its logits are compared, too; the stand-in engine has no tensors and runs more examples.
Of other engines one thing is wrong: each has to be found, and what is found is a program.
"""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given

from paged.errors import InvalidProgram, NeverFits
from paged.testing import (
    Capabilities,
    EngineRequest,
    EngineRig,
    EngineWorld,
    ServingEngine,
    Violation,
    capabilities_of,
    pressure_differences,
)
from paged.testing.engine_rig import Stream
from paged.testing.machines import EngineMachine, first_violation, run_machine, settings_for
from paged.testing.saved import load, rerun, save
from paged.testing.stand_in_engine import StandInEngine
from paged.testing.strategies import pressures

SHARES = {
    0.5: "ended by length",
    0.4: "abort",
    0.3: "cut by the pool",
    0.15: "preempted",
    0.1: "abort halfway",
    0.08: "hit",
    0.05: "refused",
    0.03: "ended by stop",
    0.02: "duplicate refused",
}
"""Share of the examples → the events that have to occur in so many."""
TIGHT = EngineWorld(num_blocks=6, block_size=2, host_blocks=4)
REQUESTS = [EngineRequest(id=f"r{number}", prompt=[0, 1, number], max_tokens=8) for number in range(3)]
AMPLE = TIGHT.ample(11)


def sevens(request):
    """What no engine answers."""
    return Stream([7] * request.max_tokens)


@pytest.mark.parametrize(("is_ours", "few", "steps"), [(True, 40, 15), (False, 80, 20)], ids=["ours", "stand-in"])
def test_everybody_is_answered_as_if_he_were_alone(reached_by, is_ours, few, steps):
    if is_ours:
        pytest.importorskip("torch")
    reached = reached_by(EngineMachine if is_ours else type("Machine", (EngineMachine,), {"build": StandInEngine}))
    run_machine(reached.machine, few=few, steps=steps)
    assert reached.num_examples >= few * 5 // 8
    assert reached.below(SHARES) == {} and (is_ours or reached.examples["swapped"] > 0)


def test_pressure_changes_no_answer_of_the_stand_in_engine_and_is_there_in_a_third_of_the_scenarios():
    preempted = []

    class Watched(StandInEngine):
        def step(self):
            outputs = super().step()
            preempted[-1] = self.scheduler.stats().preemptions > 0
            return outputs

    @given(scenario=pressures())
    def press(scenario):
        world, requests = scenario
        preempted.append(False)
        assert pressure_differences(Watched, requests, world.ample(world.longest), world) == []

    press()
    assert sum(preempted) >= len(preempted) // 3


@pytest.fixture
def builders():
    """Our engine, and the run that poisons what is free."""
    pytest.importorskip("torch")
    from paged.testing.engine_world import build_engine
    from paged.testing.pressure_run import PressureRun
    from paged.testing.tiny_model import tiny_model

    return {"engine": build_engine, "run": lambda world: PressureRun(tiny_model(), world)}


@pytest.mark.parametrize("name", ["engine", "run"])
def test_ours_satisfies_the_protocol_and_gives_the_same_bits(builders, name):
    assert isinstance(builders[name](TIGHT), ServingEngine)
    assert pressure_differences(builders[name], REQUESTS, AMPLE, TIGHT) == []


def test_a_bit_of_a_logit_is_a_difference(builders):
    def build(world):
        engine = builders["engine"](world)
        if world == TIGHT:
            logits = engine.worker.logits
            engine.worker.logits = lambda step: logits(step) * (1 + 2**-23)
        return engine

    found = pressure_differences(build, REQUESTS, AMPLE, TIGHT)
    assert len(found) == 3 and all("logits of its output 0 differ by up to" in sentence for sentence in found)


class ListensToNeighbours(StandInEngine):
    """The first word of a step is another one when somebody else gets one, too."""

    def step(self):
        outputs = super().step()
        if len(outputs) > 1 and outputs[0].token_ids:
            other = [(token + 1) % self.world.vocabulary for token in outputs[0].token_ids]
            outputs[0] = msgspec.structs.replace(outputs[0], token_ids=other)
        return outputs


class LeaksOnAbort(StandInEngine):
    """A block of whoever is aborted halfway is never given back."""

    def abort(self, request_id):
        is_running = request_id in self.known and self.scheduler.status(request_id) == "running"
        for row in self.scheduler.rows_of(request_id) if is_running else ():
            self.manager._memory.device.keep(self.manager.table(row)[:1])
        return super().abort(request_id)

    def check(self):
        return []


class NeverEnds(StandInEngine):
    """After a preemption nothing is computed any more."""

    def step(self):
        return [] if self.scheduler.stats().preemptions else super().step()


class GivesTheWrongReason(StandInEngine):
    """Whoever reaches its length before others do is said to have been stopped."""

    def step(self):
        outputs = super().step()
        wrong = {"length": "stop"} if self.has_unfinished else {}
        return [
            msgspec.structs.replace(each, finish_reason=wrong.get(each.finish_reason, each.finish_reason))
            for each in outputs
        ]


class ForgetsARequest(StandInEngine):
    """Every third request is taken and lost."""

    num_taken = 0

    def add_request(self, prompt, params=None, *, id, **more):
        self.num_taken += 1
        return id if self.num_taken % 3 == 0 else super().add_request(prompt, params, id=id, **more)


class AnswersTheDead(StandInEngine):
    """Whoever is aborted receives one more token."""

    dead = None

    def abort(self, request_id):
        self.dead = super().abort(request_id)
        return self.dead

    def step(self):
        late, self.dead = self.dead, None
        outputs = super().step()
        return outputs if late is None else [*outputs, msgspec.structs.replace(late, token_ids=[0], finish_reason=None)]


class StopsTooLate(StandInEngine):
    """Everybody gets a token more than was asked for, as far as there is room."""

    def add_request(self, prompt, params, **more):
        return super().add_request(prompt, msgspec.structs.replace(params, max_tokens=params.max_tokens + 1), **more)


class RefusesWhatFits(StandInEngine):
    """While somebody else is served, there is no room."""

    def add_request(self, prompt, params, *, id, **more):
        if self.has_unfinished and len(prompt) > 2:
            raise NeverFits("no room just now", needed=1, limit=0, unit="blocks")
        return super().add_request(prompt, params, id=id, **more)


class LosesCopies(StandInEngine):
    """What goes to the host does not arrive there; its own check does not look."""

    def __init__(self, world):
        super().__init__(world)
        copy = self.shadow.copy
        self.shadow.copy = lambda kind, pairs: [] if kind == "device_to_host" else copy(kind, pairs)

    def check(self):
        return self.scheduler.check()


FAULTS = {
    ListensToNeighbours: "received",
    # Blocks that are gone are missed by whoever comes next, or at the end.
    LeaksOnAbort: "blocks are used|alone with",
    NeverEnds: "has not ended",
    GivesTheWrongReason: "by stop; alone with",
    ForgetsARequest: "the engine has nothing unfinished",
    # Who has the id of one that was aborted gets what was meant for that one.
    AnswersTheDead: "it does not live|alone it is",
    StopsTooLate: "instead of",
    RefusesWhatFits: "an empty pool holds it",
    LosesCopies: "received",
}
"""What is wrong, and a part of what has to be said of it."""


@pytest.mark.parametrize(("fault", "words"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_in_an_engine_is_found(fault, words):
    class Machine(EngineMachine):
        build = fault

    violation, _ = first_violation(Machine, settings_for(400, steps=20))
    assert any(each in violation.found[0] for each in words.split("|"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (ListensToNeighbours, " instead of "),
        (NeverEnds, "request r2: it has not ended."),
        (GivesTheWrongReason, "it ended by stop instead of length"),
    ],
)
def test_a_fault_that_shows_beside_others_is_a_difference_under_pressure(fault, words):
    found = pressure_differences(fault, REQUESTS, AMPLE, TIGHT, most_steps=200)
    assert any(words in sentence for sentence in found)


def test_a_reference_is_from_elsewhere_and_a_program_of_a_machine_keeps_it_and_its_capabilities_where_it_is_shrunk_and_saved(
    tmp_path,
):
    class Machine(EngineMachine):
        build, reference = StandInEngine, staticmethod(sevens)
        capabilities = replace(StandInEngine.capabilities, salts=False)

    with pytest.raises(Violation, match=r"received \[\d\]; alone it is \[7\]") as caught:
        run_machine(Machine, few=5)
    program, given = caught.value.program, {"reference": sevens, "capabilities": Machine.capabilities}
    assert [verb for verb, _ in program.calls] == ["add", "step"] and program.options == given
    saved = load(save(caught.value, tmp_path, StandInEngine))
    assert saved.program == program and rerun(saved).found == caught.value.found
    with pytest.raises(InvalidProgram, match="the reference that answers were held against cannot be found"):
        rerun(msgspec.structs.replace(saved, reference="?"))


def test_a_request_is_cut_to_what_the_engine_offers():
    class Plain(StandInEngine):
        capabilities = replace(StandInEngine.capabilities, retention=False, private_rows=False)

        def add_request(self, prompt, params=None, *, id):
            return super().add_request(prompt, params, id=id)

    request = EngineRequest(id="a", prompt=[0], reads_cache=False, writes_cache=False, keeps=(1, None))
    assert pressure_differences(Plain, [request], AMPLE, TIGHT) == []


def test_what_an_engine_sends_to_nobody_is_a_difference():
    class RepeatsItself(StandInEngine):
        """The last output of each request comes twice."""

        def step(self):
            outputs = super().step()
            return [*outputs, *(each for each in outputs if each.finish_reason)]

    found = pressure_differences(RepeatsItself, REQUESTS, AMPLE, TIGHT)
    assert "request r0: it received Output(id='r0'" in found[0] and "and is not served." in found[0]


def test_an_engine_whose_outputs_are_none_is_a_violation_with_its_program():
    rig = EngineRig(EngineWorld(), type("Answers", (StandInEngine,), {"step": lambda self: [None]}), reference=sevens)
    with pytest.raises(InvalidProgram, match="5 is no EngineRequest."):
        rig.add(5)
    rig.add(EngineRequest(id="a", prompt=[0, 1], max_tokens=2))
    with pytest.raises(Violation, match="raised AttributeError: 'NoneType' object has no attribute 'id'") as caught:
        rig.step()
    assert caught.value.program.lines[-1] == "rig.step(1)"


def test_what_is_not_offered_is_not_called():
    class Bare:
        """As little as an engine may have."""

        def __init__(self, world):
            self._engine = StandInEngine(world)

        @property
        def has_unfinished(self):
            return self._engine.has_unfinished

        def add_request(self, prompt, params=None, *, id=None):
            self._engine.add_request(prompt, params, id=id)

        def step(self):
            return self._engine.step()

        def abort(self, request_id):
            raise AssertionError("it is said not to be there")

    found = Capabilities(logits=False, counts=False, check=False, retention=False, private_rows=False)

    class Machine(EngineMachine):
        build = Bare
        capabilities = replace(found, abort=False, priority=False, salts=False, seeds=False)

    assert isinstance(Bare(EngineWorld()), ServingEngine)
    assert capabilities_of(Bare(EngineWorld())) == found
    run_machine(Machine, few=20, steps=20)


def test_a_program_of_an_engine_is_short_and_comes_back_from_a_file(tmp_path):
    rig = EngineRig(EngineWorld(num_blocks=3), ForgetsARequest)
    for number in range(2):
        rig.add(EngineRequest(id=f"r{number}", prompt=[0, 1], temperature=0.5, seed=number, stop_token_ids=(1,)))
    rig.step(2)
    rig.step()
    rig.abort("r1")
    rig.drain()
    with pytest.raises(Violation, match="has nothing unfinished") as caught:
        rig.add(EngineRequest(id="r2", prompt=[0], priority=1, salt="a"))
    assert caught.value.program.lines[1:3] == [
        "rig.add(EngineRequest(id='r0', prompt=[0, 1], temperature=0.5, seed=0, stop_token_ids=(1,)))",
        "rig.add(EngineRequest(id='r1', prompt=[0, 1], temperature=0.5, seed=1, stop_token_ids=(1,)))",
    ]
    file = save(caught.value, tmp_path, StandInEngine)
    saved = load(file)
    assert saved.program == caught.value.program
    assert saved.build == "paged.testing.stand_in_engine:StandInEngine"
    assert rerun(saved) is None
    again = rerun(saved, ForgetsARequest)
    assert again.found == caught.value.found
    assert again.program == caught.value.program
