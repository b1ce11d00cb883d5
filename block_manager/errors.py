"""What a caller of the memory layer can get wrong, as a tree of typed errors.

    PagedError
    ├── InvalidConfig      a size that is zero, negative or contradictory
    ├── OutOfBlocks        more blocks wanted than can be drawn
    ├── UnknownRow         a row that no sequence holds
    ├── DuplicateRow       the same row twice in one call
    ├── RowInFlight        the row is in this batch already
    ├── NothingInFlight    no batch is out
    ├── RowSwapped         part of the row lies on the host
    ├── InvalidTokens      no tokens, or tokens that are no token ids
    ├── InvalidNamespace   a namespace that cannot be told apart exactly
    ├── UnknownContent     no block of the prompt is in the cache
    └── CannotCopy         a copy or pickle of what counts one memory

Each is raised before anything changes and carries the numbers as attributes. InvalidConfig, InvalidTokens and CannotCopy are every
room's, and stand in `paged.errors`.
"""

from paged.errors import PagedError


class OutOfBlocks(PagedError, ValueError):
    """More blocks wanted than the pool can give: `wanted` and `free` (blocks), `tier` ("device" or "host")."""

    def __init__(self, wanted: int, free: int, tier: str = "device") -> None:
        super().__init__(f"{wanted:,} blocks wanted, {free:,} free on the {tier}. Free some, or raise the pool's size.")
        self.wanted = wanted
        self.free = free
        self.tier = tier


class _RowError(PagedError, ValueError):
    sentence = ""

    def __init__(self, row: object, detail: str = "") -> None:
        super().__init__(f"row {row}: {self.sentence}{detail}")
        self.row = row


class UnknownRow(_RowError):
    """A row that no sequence holds; freeing a row twice is this, too."""

    sentence = "no sequence holds it (never opened, or freed already)."


class DuplicateRow(_RowError):
    """The same row twice in one call."""

    sentence = "listed twice in one call."


class RowInFlight(_RowError):
    """The row is in the batch that is being composed already; it can be in the next one as well."""

    sentence = "in this batch already; next_batch() begins another one."


class NothingInFlight(PagedError, ValueError):
    """No batch is out or being composed, so there is nothing to confirm or cancel."""

    def __init__(self) -> None:
        super().__init__("no row is in flight; there is nothing to confirm or cancel.")


class RowSwapped(_RowError):
    """Part of the row lies on the host; it has to come back first."""

    sentence = "part of it lies on the host; swap it in first."


class InvalidNamespace(PagedError, TypeError):
    """A namespace that is not built of None, bool, int, str, bytes and tuples of them."""


class UnknownContent(PagedError, LookupError):
    """Not even the first block of a prompt of `num_tokens` tokens is in the cache, so there is nothing to keep."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            f"no full block of these {num_tokens:,} tokens is in the cache of this namespace. Compute them first, or look them up."
        )
        self.num_tokens = num_tokens


class MemoryClaimed(PagedError, RuntimeError):
    """`call`, on memory that a scheduler has claimed, would change it behind the scheduler's back."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call}: a scheduler has this memory and alone changes its rows; call the scheduler (add, abort, finish, append, fork), or make"
            " another BlockManager."
        )
        self.call = call
