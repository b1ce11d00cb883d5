"""A public error is the same in another process, and as a copy: its class, its text and its attributes."""

import copy
import inspect
import pickle
from pathlib import Path

import pytest

import paged

PUBLIC_ERRORS = [
    each
    for name, each in vars(paged.errors).items()
    if isinstance(each, type) and issubclass(each, BaseException) and not name.startswith("_")
]
ARGUMENTS = {
    "int": 1_000, "int | None": 7, "float": 0.5, "float | None": 0.5, "str": "a", "str | None": "b",
    "str | int | None": "c", "object": "d", "Path": Path("e"), "Iterable[str]": ["f", "g"], "Iterable[int]": [2, 4],
}  # fmt: skip
"""By what a class's own `__init__` says that it takes."""


def instance_of(kind):
    """One error of this class, with numbers in its text where it makes that itself."""
    if all("__init__" not in vars(each) for each in kind.__mro__ if each.__module__ == "paged.errors"):
        return kind("a")
    wanted = [each for name, each in inspect.signature(kind).parameters.items() if name != "self"]
    given = {each.name: ARGUMENTS[each.annotation] for each in wanted}
    named = {each.name: given.pop(each.name) for each in wanted if each.kind is each.KEYWORD_ONLY}
    return kind(*given.values(), **named)


def same_elsewhere(error):
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("taken", [same_elsewhere, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", PUBLIC_ERRORS, ids=lambda kind: kind.__name__)
def test_every_public_error_has_the_same_text_and_attributes_as_a_copy_and_out_of_a_pickle(kind, taken):
    error = instance_of(kind)
    error.add_note("while a request was added")
    other = taken(error)
    assert type(other) is kind and isinstance(error, paged.PagedError | ImportError | Warning)
    assert (str(other), repr(other), other.args) == (str(error), repr(error), error.args)
    assert vars(other) == vars(error)
    for name in ("name", "path"):
        assert getattr(other, name, None) == getattr(error, name, None)
