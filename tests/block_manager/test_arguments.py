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


@pytest.mark.parametrize("token", [2**31, 2**64, 10**6000], ids=["32 bits", "65 bits", "thousands"])
def test_an_integer_that_is_too_large_for_a_token_id_is_said_to_be(token):
    with pytest.raises(InvalidTokens, match="is larger than int32 holds|below 2\\^31"):
        token_array([1, token])
