"""What a caller of the scheduler can get wrong, as a tree of typed errors.

    PagedError
    ├── InvalidRequest     a request whose fields cannot be (empty prompt, negative counts, token ids outside the vocabulary)
    ├── DuplicateRequest   the id of a request that is still alive
    ├── UnknownRequest     an id that was never added, or ended long ago
    ├── RequestInFlight    the request is in a batch that has not ended
    ├── NeverFits          an empty pool, or the model, could not hold the prompt and one output
    ├── WaitingFull        the limit on waiting requests is reached
    ├── UnknownPolicy      a policy name that is not in POLICIES
    ├── WrongTokens        counts or tokens in `update` that do not fit the batch
    ├── WrongDrafts        drafts for rows that do not run, or that are no token ids
    ├── SchedulerInUse     another call of the same scheduler is running
    ├── TooManyOutstanding more batches out than the limit
    └── BatchError         a batch that cannot be ended
        ├── BatchEnded         it has ended already
        ├── BatchOutOfOrder    an older one has to be updated, or a later one cancelled, first
        └── ForeignBatch       another scheduler made it

Each is raised before anything changes and carries the numbers as attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from paged.block_manager import PagedError


class InvalidRequest(PagedError, ValueError):
    """A request whose fields cannot be."""


class SchedulerInUse(PagedError, RuntimeError):
    """`call` cannot begin while `running` has not ended, in `thread` (a name); None: in this very thread."""

    def __init__(self, call: str, running: str, thread: str | None = None) -> None:
        where = "this thread, which made it" if thread is None else f"another thread, {thread}"
        super().__init__(
            f"{call}: {running} is running on the same scheduler in {where}. Hold a lock around calls of one scheduler; nothing has changed."
        )
        self.call = call
        self.running = running
        self.thread = thread


class DuplicateRequest(PagedError, ValueError):
    """The id of a request that is still alive: `id`."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f'request "{request_id}" is still alive; an id is free again when its request has ended.')
        self.id = request_id


class UnknownRequest(PagedError, KeyError):
    """An id that was never added, or ended long ago: `id`."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f'no request "{request_id}" is known: never added, or ended too long ago.')
        self.id = request_id

    def __str__(self) -> str:
        return str(self.args[0])


class RequestInFlight(PagedError, ValueError):
    """The request is in a batch that has not ended: `id`."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f'request "{request_id}" is in flight; end its batch first.')
        self.id = request_id


class NeverFits(PagedError, ValueError):
    """A prompt that can never run: `blocks_needed` and `num_blocks`, or `tokens_needed` and `max_model_len`."""

    def __init__(self, message: str, *, needed: int, limit: int, unit: str) -> None:
        super().__init__(message)
        self.blocks_needed = needed if unit == "blocks" else None
        self.num_blocks = limit if unit == "blocks" else None
        self.tokens_needed = needed if unit == "tokens" else None
        self.max_model_len = limit if unit == "tokens" else None


class WaitingFull(PagedError, RuntimeError):
    """The limit on waiting requests is reached: `limit`."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit:,} requests are waiting, which is the limit (max_waiting). Try again when some have been admitted."
        )
        self.limit = limit


class UnknownPolicy(PagedError, ValueError):
    """A policy name that is not known: `name`, and `known`, the names that are."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        near = get_close_matches(name, self.known, 1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        super().__init__(f'unknown policy "{name}"; known are {", ".join(self.known)}.{hint}')


class WrongTokens(PagedError, ValueError):
    """Counts or tokens in `update` that do not fit the batch."""


class WrongDrafts(PagedError, ValueError):
    """Drafts for a request that does not run, or that are no token ids of the vocabulary."""


class TooManyOutstanding(PagedError, RuntimeError):
    """So many batches are out that no other may be scheduled: `num_outstanding`, `limit`."""

    def __init__(self, num_outstanding: int, limit: int) -> None:
        super().__init__(
            f"{num_outstanding} batches are out, which is the limit (max_outstanding {limit}). End the oldest one first."
        )
        self.num_outstanding = num_outstanding
        self.limit = limit


class BatchError(PagedError, ValueError):
    """A batch that cannot be ended: `number`."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"batch {number} {message}")
        self.number = number


class BatchEnded(BatchError):
    """The batch has ended already."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "has ended already.")


class BatchOutOfOrder(BatchError):
    """An older batch has to be updated, or a later one cancelled, first: `first` is its number."""

    def __init__(self, number: int, first: int, verb: str) -> None:
        super().__init__(
            number, f"cannot be {verb} before batch {first}: updates go oldest first, cancels latest first."
        )
        self.first = first


class ForeignBatch(BatchError):
    """Another scheduler made the batch."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "was made by another scheduler.")


def counted(number: int, word: str) -> str:
    """So many of a thing, as people say it: 1 block, 2 blocks."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
