"""Objects that cannot be copied, because each counts one memory."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from paged.errors import CannotCopy


class Uncopyable:
    """Base of classes whose objects `copy.copy`, `copy.deepcopy` and `pickle` refuse: a copy would name blocks of the
    same KV memory, and neither object would know which of them the other one hands out."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CannotCopy(type(self).__name__)
