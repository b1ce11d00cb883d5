"""The pressure oracle over engines that are only known from outside: no difference where there is none, and each one that there is."""

import pytest
from hypothesis import given

from paged.testing import EngineRequest, EngineWorld, ServingEngine, StandInEngine, pressure_differences
from paged.testing.strategies import pressures

TIGHT = EngineWorld(num_blocks=6, block_size=2, host_blocks=4)
REQUESTS = [EngineRequest(id=f"r{number}", prompt=[0, 1, number], max_tokens=8) for number in range(3)]
AMPLE = TIGHT.ample(11)


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
