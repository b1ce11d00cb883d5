"""What tests of sessions and hints share: a scheduler with blocks of one token, one request at a time."""

from collections.abc import Iterator
from typing import Any

import pytest

from paged import BlockManager, Hint, HintOutcome, Request, Scheduler

from ..driving import step, steps_of  # noqa: TID252


class Desk:
    """Serves requests whole, each with one output, so that what one leaves is its prompt. Blocks have one token, or `size`."""

    def __init__(
        self, num_blocks: int, size: int = 1, *, host_blocks: int = 0, groups: Any = None, **limits: Any
    ) -> None:
        several = {} if groups is None else {"groups": groups}
        self.manager = BlockManager(num_blocks, size, host_blocks=host_blocks, host_caching=host_blocks > 0, **several)
        self.scheduler = Scheduler(self.manager, max_tokens_per_step=64, max_sequences=8, **limits)
        self.num = 0

    def add(self, prompt: list[int], session: str | None = None, now: float = 0.0, **wishes: Any) -> str:
        self.num += 1
        id = wishes.pop("id", f"r{self.num}")
        wishes = {"max_tokens": 1, **wishes}
        self.scheduler.add(Request(id=id, prompt=prompt, session_id=session, **wishes), now=now)
        return id

    def serve(self, prompt: list[int], session: str | None = None, now: float = 0.0, **wishes: Any) -> str:
        id = self.add(prompt, session, now, **wishes)
        self.run(now)
        return id

    def run(self, now: float = 0.0) -> None:
        steps_of(self.scheduler, 0, now)

    def step(self, now: float = 0.0) -> Any:
        return step(self.scheduler, 0, now)

    def hint(self, action: str, now: float = 0.0, **what: Any) -> HintOutcome:
        return self.scheduler.hint(Hint(action=action, **what), now=now)

    def on_device(self, prompt: list[int]) -> int:
        """Tokens of a prompt that are cached on the device."""
        return self.scheduler.explain_prefix(prompt).device_tokens

    def on_host(self, prompt: list[int]) -> int:
        return self.scheduler.explain_prefix(prompt).host_tokens


@pytest.fixture
def desk() -> Iterator[Any]:
    """Builds desks; each must be free of violations when the test ends."""
    made: list[Desk] = []

    def make(*numbers: int, **options: Any) -> Desk:
        made.append(Desk(*numbers, **options))
        return made[-1]

    yield make
    for each in made:
        assert each.scheduler.check() == []
