"""What enters the memory layer: numbers as they are, or none."""

import numpy as np
import pytest

from paged.block_manager.arguments import int64_array


@pytest.mark.parametrize("highest", [np.array([2**63 - 1], np.uint64), [2**63 - 1], np.array([2**63 - 1])])
def test_the_highest_integer_of_64_bits_is_one(highest):
    assert int64_array(highest).tolist() == [2**63 - 1]


@pytest.mark.parametrize("over", [np.array([2**63], np.uint64), [2**63], [2**64]])
def test_an_integer_above_it_is_none(over):
    assert int64_array(over) is None
