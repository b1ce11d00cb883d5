"""Serving engines from outside, whatever their clients do: every answer has to be the one that its request gets alone.

Ours runs a model of a few thousand weights, and its logits are compared, too; the stand-in engine has no tensors and runs more examples.
The machine has to reach what matters: each event named here is expected in a share of the examples.
"""

import pytest

from paged.testing import EngineRequest, EngineRig, EngineWorld, Violation
from paged.testing.engine_rig import alone
from paged.testing.engine_world import build_engine
from paged.testing.machines import EngineMachine, run_machine
from paged.testing.stand_in_engine import StandInEngine

SHARES = {
    0.5: "ended by length",
    0.4: "abort",
    0.3: "cut by the pool",
    0.15: "preempted",
    0.1: "abort halfway",
    0.08: "hit",
    0.05: "refused, duplicate refused",
    0.03: "ended by stop",
}
"""Share of the examples → the events that have to occur in so many."""


def test_our_engine_answers_everybody_as_if_he_were_alone(reached_by):
    pytest.importorskip("torch")
    reached = reached_by(EngineMachine)
    run_machine(reached.machine, few=40, steps=15)
    assert reached.num_examples >= 25
    assert reached.below(SHARES) == {}


@pytest.mark.parametrize("kind", ["lookup", "lookahead", "draft"])
def test_our_engine_answers_with_drafts_as_it_does_without(kind, reached_by):
    pytest.importorskip("torch")
    num_right = 0

    class Machine(EngineMachine):
        # Without drafts: tokens and logits, bit by bit.
        reference = staticmethod(alone(build_engine, EngineWorld().ample(1)))

        @staticmethod
        def build(world):
            return build_engine(world, speculate=kind)

        def teardown(self):
            nonlocal num_right
            super().teardown()
            num_right += self.rig.engine.stats().accepted_tokens

    reached = reached_by(Machine)
    run_machine(reached.machine, few=30, steps=15)
    assert min(reached.examples[name] for name in ("hit", "preempted", "abort halfway", "ended by stop")) >= 3
    assert num_right > 20


def test_the_stand_in_engine_answers_everybody_as_if_he_were_alone(reached_by):
    class Machine(EngineMachine):
        build = StandInEngine

    reached = reached_by(Machine)
    run_machine(reached.machine, few=80, steps=20)
    assert reached.num_examples >= 50
    assert reached.below(SHARES) == {}
    assert reached.examples["swapped"] > 0


def test_an_engine_that_sums_in_whatever_order_is_found_by_its_logits():
    pytest.importorskip("torch")
    from paged import Engine
    from paged.testing.tiny_model import tiny_model

    def build(world):
        return Engine(tiny_model(), num_blocks=64, block_size=4, max_tokens_per_step=5, batch_invariant=False)

    rig = EngineRig(EngineWorld(num_blocks=64, block_size=4, max_tokens_per_step=5), build)
    for number in range(3):
        rig.add(EngineRequest(id=f"r{number}", prompt=[0, 1, 1, 0, 1, 0, 0] * (1 + number), max_tokens=16))
    with pytest.raises(Violation, match="the logits of its output"):
        rig.drain()
