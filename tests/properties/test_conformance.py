"""A subject that does not keep its side of the protocol is told so by the name of the method, before anything goes wrong inside the kit."""

from types import SimpleNamespace

import numpy as np
import pytest

from paged import BlockManager, Request, Scheduler
from paged.testing import BrokenPromise, SchedulerRig, Violation, World, held_to
from paged.testing.world import build_scheduler


def answering(name, answer):
    """A manager whose member `name` is a method that answers with something else."""

    class Ours(BlockManager):
        pass

    setattr(Ours, name, lambda self, *arguments, **named: answer)
    return held_to("KVManager", Ours(4, 2))


def test_a_method_that_is_missing_is_named_with_what_it_promises():
    class Empty:
        num_blocks = 4

    with pytest.raises(
        BrokenPromise, match=r"Empty has no `num_host_blocks`; KVManager asks for one that gives an int"
    ):
        held_to("KVManager", Empty())


@pytest.mark.parametrize(
    ("name", "arguments", "answer", "words"),
    [
        ("table", (0,), None, "Ours.table(0) gave None; KVManager promises int [n], the row's device blocks in order."),
        ("table", (0,), [0, 1], "gave [0, 1]; KVManager promises int [n]"),
        ("table", (0,), np.array([0.5]), "promises int [n]"),
        ("table", (0,), np.array([[0]]), "promises int [n]"),
        ("add", ([1],), None, "Ours.add([1]) gave None; KVManager promises an int, the row."),
        ("add", ([1],), True, "promises an int, the row"),
        ("lookup", ([1],), (0, []), "promises `num_tokens`, an int, and `blocks`"),
        ("allocate", ([0], [1]), None, "promises moves: device_to_host, host_to_device and device_to_device"),
        ("cached_contents", (), [], "promises a set of tuples"),
        ("reset_cache", (), None, "promises a bool"),
        ("check", (), "all is well", "promises a list of sentences"),
        ("confirm", (), None, "promises an int, the number of the batch that has ended"),
    ],
)
def test_an_answer_of_the_wrong_shape_is_told_with_the_method_its_arguments_and_the_promise(
    name, arguments, answer, words
):
    manager = answering(name, answer)
    with pytest.raises(BrokenPromise) as caught:
        getattr(manager, name)(*arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("part", "name", "answer", "promise"),
    [
        *[("device", "num_free", wrong, "an int of at least 0, blocks") for wrong in (2.0, None, -1)],
        ("device", "ref_counts", [0, 0, 0, 0], "int [num_blocks], references to each block"),
        ("device", "ref_counts", np.zeros(3, np.int32), "int [num_blocks], references to each block"),
        ("device", "states", np.zeros(3, np.int8), "int [num_blocks]: 0 free, 1 cached, 2 used"),
        ("rows", "num_computed", np.zeros((1, 1), np.int64), "int [rows], tokens of each row that are computed"),
        ("rows", "live", {0}, "int [n], the rows that sequences hold"),
    ],
)
def test_a_figure_that_is_no_count_and_no_column_is_named(part, name, answer, promise):
    manager = BlockManager(4, 2)
    figures = getattr(manager, part)
    kept = {each: getattr(figures, each) for each in dir(figures) if not each.startswith("_")}
    setattr(manager, part, SimpleNamespace(**kept | {name: answer}))
    held = getattr(held_to("KVManager", manager), part)
    with pytest.raises(BrokenPromise) as caught:
        getattr(held, name)
    assert str(caught.value) == f"BlockManager.{part}.{name} gave {answer!r}; KVManager promises {promise}."


def test_a_feature_that_is_missing_is_named_when_it_is_called_with_the_way_to_leave_it_out():
    class Ours:
        def __getattr__(self, name):
            if name == "fork":
                raise AttributeError(name)
            return getattr(BlockManager(4, 2), name)

    with pytest.raises(BrokenPromise, match=r"Ours has no `fork`.*Capabilities\(fork=False\)"):
        held_to("KVManager", Ours()).fork(0)


class ReturnsNothing(Scheduler):
    """Its batches get lost."""

    def schedule(self, now=0.0):
        super().schedule(now)


def test_a_scheduler_that_breaks_a_promise_is_a_violation_with_its_program():
    rig = SchedulerRig(World(), lambda world: build_scheduler(world, ReturnsNothing))
    rig.add(Request(id="a", prompt=[1], max_tokens=1))
    with pytest.raises(
        Violation, match=r"ReturnsNothing\.schedule\(\) gave None; StepScheduler promises a batch"
    ) as caught:
        rig.schedule()
    assert caught.value.program.lines[-1] == "rig.schedule()"
