"""Requests that a trace has several times, and whose contents are not to be found again for that alone."""

import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidConfig
from paged.study.traces.content import MAX_SHARED_IDS, UNSHARED

Ids = NDArray[np.int64]


def contents_apart(segment_ids: Ids, output_ids: Ids, starts: Ids, originals: Ids) -> tuple[Ids, Ids]:
    """New ids of segments [k] and outputs [n]: first copies share contents with first copies as before, second ones with second ones.

    Request i is a copy of request `originals[i]`, its segments begin at `starts[i]`. Raises InvalidConfig for more contents than there are ids.
    """
    copy = _copy_numbers(originals)
    copies = np.concatenate((np.repeat(copy, np.diff(starts)), copy))
    ids = np.concatenate((segment_ids, output_ids))
    is_shared = ids != UNSHARED
    _, places = np.unique(ids[is_shared] * (copies.max() + 1) + copies[is_shared], return_inverse=True)
    if len(places) and places.max() >= MAX_SHARED_IDS:
        raise InvalidConfig(f"{places.max() + 1:,} shared contents; at most {MAX_SHARED_IDS:,} have ids")
    new = np.full(len(ids), UNSHARED, np.int64)
    new[is_shared] = places
    return new[: len(segment_ids)], new[len(segment_ids) :]


def _copy_numbers(originals: Ids) -> Ids:
    """How many copies of the same original stand before each, int64 [n]."""
    order = np.argsort(originals, kind="stable")
    ranked = originals[order]
    is_first = np.append(True, ranked[1:] != ranked[:-1])
    places = np.arange(len(ranked))
    numbers = np.empty(len(ranked), np.int64)
    numbers[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return numbers
