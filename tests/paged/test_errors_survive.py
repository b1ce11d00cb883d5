"""A public error is the same in another process, and as a copy: its class, its text and its attributes."""

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import paged


def public_errors():
    found = [getattr(paged, name) for name in paged.__all__]
    return [each for each in found if isinstance(each, type) and issubclass(each, BaseException)]


def instance_of(error):
    """One error of this class, with numbers in its text where it makes that itself."""
    for made_by, arguments, named in (
        (paged.OutOfBlocks, (1_000, 3, "host"), {}),
        (paged.UnknownContent, (1_000,), {}),
        (paged.RowInFlight, (7, " It shares blocks."), {}),
        (paged.NeverFits, ("too long",), {"needed": 7, "limit": 5, "unit": "blocks"}),
        (paged.WaitingFull, (1_000,), {}),
        (paged.TooManyOutstanding, (4, 4), {}),
        (paged.NothingInFlight, (), {}),
        (paged.UnknownPolicy, ("pagde", ["paged", "vllm"]), {}),
        (paged.BatchEnded, (4,), {}),
        (paged.ForeignBatch, (4,), {}),
        (paged.BatchOutOfOrder, (5, 4, "updated"), {}),
        (paged.BatchError, (5, "cannot be ended."), {}),
        (paged.BudgetTooSmall, ("too small",), {"wanted": 7, "given": 5}),
        (paged.UnknownBackend, ("fast", ["reference", "torch_gather"]), {}),
        (paged.UnsupportedByBackend, ("xformers_splitk", "a soft cap", "the others can."), {}),
        (paged.BuildFailed, ("/usr/bin/cc failed: no",), {}),
        (paged.MemoryClaimed, ("free",), {}),
        (paged.SchedulerInUse, ("add", "update", "MainThread"), {}),
        (paged.EngineInUse, ("step", "generate", "MainThread"), {}),
        (paged.ProcessorFailed, (3, "ValueError: no"), {}),
        (paged.CannotAdjust, (3, "no"), {}),
        (paged.GrammarFailed, (3, "too many items"), {}),
        (paged.MissingExtra, ("not installed",), {"name": "torch"}),
        (error, ("a",), {}),
    ):
        if error is made_by:
            return error(*arguments, **named)
    raise AssertionError("the last line takes every class")


def test_every_error_of_attention_is_a_paged_error():
    assert issubclass(paged.UnknownBackend, paged.AttentionError)
    assert issubclass(paged.AttentionError, paged.PagedError)


def same_elsewhere(error):
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("taken", [same_elsewhere, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", public_errors(), ids=lambda kind: kind.__name__)
def test_every_public_error_has_the_same_text_and_attributes_as_a_copy_and_out_of_a_pickle(kind, taken):
    error = instance_of(kind)
    error.add_note("while a request was added")
    other = taken(error)
    assert type(other) is kind
    assert (str(other), repr(other), other.args) == (str(error), repr(error), error.args)
    assert vars(other) == vars(error)
    for name in ("name", "path"):
        assert getattr(other, name, None) == getattr(error, name, None)


def test_the_texts_are_made_from_what_the_error_was_given():
    assert "1,000 blocks wanted, 3 free on the host" in str(same_elsewhere(instance_of(paged.OutOfBlocks)))
    assert 'known are paged, vllm. Did you mean "paged"?' in str(same_elsewhere(instance_of(paged.UnknownPolicy)))


def draw_too_many():
    manager = paged.BlockManager(4, 4)
    manager.reserve([manager.add([1])], [9])


def test_an_error_of_a_worker_process_is_raised_where_its_result_is_asked_for():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        result = pool.submit(draw_too_many)
        error = result.exception(timeout=600)
    assert (type(error), str(error)[:23]) == (paged.OutOfBlocks, "9 blocks wanted, 4 free")
    assert (error.wanted, error.free, error.tier) == (9, 4, "device")
