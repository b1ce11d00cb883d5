"""A replica's report: what its scheduler foresees, in the seconds that its steps take, and how those are learnt."""

import pytest

from paged import BlockManager, Request, Scheduler
from paged.engine.pace import Pace
from paged.engine.replica_load import load_of

from .files_of_others import assert_by_hand, by_hand_in  # noqa: TID252


def asked(prompt, outputs=1, tenant=None):
    """A request, but for its id."""
    return {"prompt": prompt, "max_tokens": outputs, "expected_tokens": outputs, "tenant": tenant}


FORTY, RUNS = asked(range(40)), asked(range(100, 104), 5)
QUEUED = [
    asked(range(40), tenant="a"),
    asked(range(200, 210), tenant="a"),
    asked(range(20)),
    asked(range(7), tenant="b"),
]
STEPS = [(tokens, 0.002 + 0.001 * tokens) for tokens in (1, 5, 9, 2, 40, 3) * 20]


def served(*after, waiting=(), num_blocks=100, **limits):
    """A scheduler to which these requests came."""
    scheduler = Scheduler(BlockManager(num_blocks, 4), max_tokens_per_step=50, **limits)
    for number, request in enumerate([*after, *waiting]):
        scheduler.add(Request(id=str(number), **request))
        if number < len(after):
            batch = scheduler.schedule()
            scheduler.update(batch, [7] * int(batch.samples.sum()))
    return scheduler


def noted(steps, between=0.0, rests=False):
    """A pace after steps of (tokens, seconds), with so many seconds between them."""
    pace, now = Pace(), 100.0
    for tokens, seconds in steps:
        pace.note(tokens, now, now + seconds)
        now += seconds + between
        if rests:
            pace.rest()
    return pace


def load(scheduler, **told):
    pace = noted([(tokens, 0.1 + 0.01 * tokens) for tokens in (10, 20, 10, 20)], rests=True)
    return load_of(scheduler.outlook(), pace, **told)


@pytest.mark.parametrize(("call", "by_hand"), by_hand_in("loads.txt"))
def test_a_report_is_what_it_is_by_hand(call, by_hand):
    assert_by_hand(call, by_hand, globals())
