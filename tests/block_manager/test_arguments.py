"""What enters the memory layer: numbers as they are, or none."""

import numpy as np
import pytest

from paged.base.arguments import int64_array, token_array
from paged.errors import InvalidTokens


@pytest.mark.parametrize("kind", [list, lambda numbers: np.array(numbers, np.uint64)], ids=["list", "uint64"])
@pytest.mark.parametrize(("number", "is_one"), [(2**63 - 1, True), (2**63, False)])
def test_the_highest_integer_of_64_bits_is_one_and_those_above_it_are_none(kind, number, is_one):
    found = int64_array(kind([number]))
    assert found.tolist() == [number] if is_one else found is None


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ("hello", "text; encode it first."),
        ("", "text; encode it first."),
        (b"hello", "bytes; encode it first."),
        (bytearray(b"hello"), "bytes; encode it first."),
        (["a", "list"], "text among them; encode it first."),
        (None, "None."),
        (3, "3."),
        (1.5, "1.5."),
        ([1, None], "None among them."),
        ([1, 2.0], "2.0 among them."),
        ([True], "True among them."),
        ([[1, 2], [3]], "a list among them."),
        ({"prompt": [1]}, "a dict."),
        ([{"role": "user"}], "a dict among them."),
        ({1, 2}, "a set."),
        pytest.param(iter([1, 2]), "a list_iterator.", id="an iterator"),
        (np.array([1.5]), "an array of float64."),
        (np.array(["a"]), "an array of <U1."),
    ],
    ids=repr,
)
def test_what_is_no_list_of_token_ids_is_named(given, got):
    with pytest.raises(InvalidTokens) as refused:
        token_array(given)
    assert str(refused.value) == f"token ids have to be a flat sequence of integers; got {got}"


@pytest.mark.parametrize("given", [[[1, 2], [3, 4]], np.ones((2, 2), int)], ids=["lists", "array"])
def test_a_table_of_token_ids_is_not_flat(given):
    with pytest.raises(InvalidTokens, match="token ids have to be one flat sequence; got 2 dimensions"):
        token_array(given)


@pytest.mark.parametrize("token", [2**31, 2**64, 10**6000], ids=["32 bits", "65 bits", "thousands"])
def test_an_integer_that_is_too_large_for_a_token_id_is_said_to_be(token):
    with pytest.raises(InvalidTokens, match="is larger than int32 holds|below 2\\^31"):
        token_array([1, token])
