"""Values that no parameter, or hardly one, takes; and the public calls that may get them."""

import inspect
from math import inf, nan

import numpy as np

STRANGE = [
    None, True, -1, 0, 2**70, -(2**70), 1.5, nan, inf, "", "x", "\ud800", b"x", (), [], [[1]], [None], ["a"], [-1], [2**40], {}, {"a": 1}, set(),
    object(), np.int64(3), np.array([1.5]), np.array([[1]]),
]  # fmt: skip


def parameters_of(kind):
    """(call, parameter) for each parameter of each public call of a class."""
    calls = [(name, call) for name, call in vars(kind).items() if callable(call) and not name.startswith("_")]
    return [(name, parameter) for name, call in calls for parameter in list(inspect.signature(call).parameters)[1:]]


def given(call, others, parameter, value):
    """The arguments of a call: `value` for one parameter, and what `others` names for those without a default."""
    needed = [each.name for each in inspect.signature(call).parameters.values() if each.default is each.empty]
    return {name: others.get(name) for name in needed} | {parameter: value}
