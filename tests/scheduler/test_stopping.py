"""Where each row of one batch ends, by its own stop ids and its own length, and what is kept of each row for that."""

import numpy as np
import pytest

from paged.block_manager import BlockManager
from paged.scheduler import Request, Scheduler
from paged.testing.snapshots import snapshot

EOS, STOP_ID, PLAIN = 2, 3, 9
PLAIN_ROW = {}
ROW_WITH_EOS = {"eos_token_id": EOS}
ROW_WITH_STOP = {"eos_token_id": EOS, "stop_token_ids": (STOP_ID,), "min_tokens": 2}
FROM_20_TO_39 = {"stop_token_ids": tuple(range(20, 40))}
FROM_30_TO_49 = {"stop_token_ids": tuple(range(30, 50)), "eos_token_id": EOS}
LARGE = EOS + 2**16
ROW_WITH_LARGE = {"stop_token_ids": (LARGE, LARGE)}


def running(*options: dict[str, object], max_tokens: int = 5, num_blocks: int = 64, policy: str = "paged") -> Scheduler:
    """A request each, whose prompt is computed and whose first output was nothing special."""
    scheduler = Scheduler(BlockManager(num_blocks, 4), policy=policy)
    for number, each in enumerate(options):
        scheduler.add(Request(id=str(number), prompt=[1, 1, 1], max_tokens=max_tokens, **each))
    scheduler.update(scheduler.schedule(), [PLAIN] * len(options))
    return scheduler


def ends(scheduler: Scheduler, tokens: list[int], counts: list[int] | None = None) -> list[tuple[int, str | None]]:
    """How many of its new tokens each row keeps, and why it ends after them."""
    outputs = scheduler.update(scheduler.schedule(), tokens, counts)
    return [(len(output.token_ids), output.finish_reason) for output in outputs]


OWN_IDS = PLAIN_ROW, ROW_WITH_EOS, ROW_WITH_STOP
# Counted together, because they differ in high bits alone.
LIKE_IDS = ROW_WITH_LARGE, ROW_WITH_EOS, PLAIN_ROW
MANY_IDS = FROM_20_TO_39, FROM_30_TO_49, PLAIN_ROW


@pytest.mark.parametrize(
    ("rows", "tokens", "reasons"),
    [
        (OWN_IDS, [PLAIN] * 3, [None, None, None]),
        (OWN_IDS, [EOS] * 3, [None, "stop", "stop"]),
        (OWN_IDS, [STOP_ID] * 3, [None, None, "stop"]),
        (OWN_IDS, [EOS, PLAIN, EOS], [None, None, "stop"]),
        (MANY_IDS, [19] * 3, [None, None, None]),
        (MANY_IDS, [20] * 3, ["stop", None, None]),
        (MANY_IDS, [30] * 3, ["stop", "stop", None]),
        (MANY_IDS, [39] * 3, ["stop", "stop", None]),
        (MANY_IDS, [49] * 3, [None, "stop", None]),
        (MANY_IDS, [50] * 3, [None, None, None]),
        (MANY_IDS, [EOS] * 3, [None, "stop", None]),
        (LIKE_IDS, [EOS] * 3, [None, "stop", None]),
        (LIKE_IDS, [LARGE] * 3, ["stop", None, None]),
    ],
)
def test_each_row_has_stop_ids_of_its_own(rows, tokens, reasons):
    assert ends(running(*rows), tokens) == [(1, reason) for reason in reasons]


def test_of_several_tokens_each_row_keeps_those_up_to_its_stop_id_or_its_full_length():
    scheduler = running(PLAIN_ROW, FROM_30_TO_49, ROW_WITH_EOS, ROW_WITH_STOP)
    tokens = [*[PLAIN] * 5, PLAIN, 29, 30, PLAIN, EOS, PLAIN]
    assert ends(scheduler, tokens, [5, 4, 0, 2]) == [(4, "length"), (3, "stop"), (0, None), (1, "stop")]


@pytest.mark.parametrize("has_room", [True, False], ids=["in its row", "after its row was taken"])
@pytest.mark.parametrize(
    ("min_tokens", "tokens", "end"),
    [
        (2, [EOS, PLAIN], (1, "stop")),
        (3, [EOS, EOS, PLAIN], (2, "stop")),
        (3, [EOS, PLAIN, EOS], (3, "stop")),
        (4, [EOS, EOS], (2, None)),
        (5, [EOS, EOS, PLAIN, PLAIN, EOS], (4, "length")),
    ],
)
def test_a_stop_id_counts_from_the_least_length_on_among_several_tokens(has_room, min_tokens, tokens, end):
    options = PLAIN_ROW, {"eos_token_id": EOS, "min_tokens": min_tokens}
    scheduler = running(*options, num_blocks=64 if has_room else 2, policy="vllm")
    batch = scheduler.schedule()
    if not has_room:
        scheduler.schedule()
        assert scheduler.rows_of("1") == []
    outputs = scheduler.update(batch, [PLAIN, *tokens], [1, len(tokens)])
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(1, None), end]


@pytest.mark.parametrize("before", [ROW_WITH_EOS, FROM_30_TO_49, {"eos_token_id": EOS, "stop_token_ids": (EOS, EOS)}])
def test_a_row_that_changed_hands_has_not_the_stop_ids_of_before_and_others_keep_theirs(before):
    scheduler = running(before, FROM_20_TO_39)
    (row,) = scheduler.rows_of("0")
    scheduler.abort("0")
    scheduler.add(Request(id="next", prompt=[1, 1, 1], max_tokens=5))
    # "1" decodes, and stands first.
    assert (ends(scheduler, [30, EOS]), scheduler.rows_of("next")) == ([(1, "stop"), (1, None)], [row])


def ample_scheduler():
    return Scheduler(BlockManager(400, 4), policy="fastgen", max_sequences=200)


def add_all(scheduler, numbers):
    for number in numbers:
        scheduler.add(Request(id=str(number), prompt=[number], max_tokens=9, eos_token_id=1000 + number))


def test_rows_keep_their_stop_ids_when_the_columns_grow():
    scheduler = ample_scheduler()
    add_all(scheduler, range(60))
    scheduler.update(scheduler.schedule(), [7] * 60)
    add_all(scheduler, range(60, 100))
    # Each second one samples its own, and those behind them their neighbours'.
    outputs = scheduler.update(scheduler.schedule(), [1000 + number // 2 * 2 for number in range(100)])
    assert ([output.finish_reason for output in outputs], scheduler.check()) == (["stop", None] * 50, [])


@pytest.mark.parametrize("name", ["zeros", "empty"])
def test_a_step_that_finds_no_memory_for_its_columns_changes_nothing(monkeypatch, name):
    scheduler = ample_scheduler()
    add_all(scheduler, range(100))

    def short(*args, **kwargs):
        raise MemoryError

    before = snapshot(scheduler.manager), scheduler.counts()
    with monkeypatch.context() as patch:
        patch.setattr(np, name, short)
        with pytest.raises(MemoryError):
            scheduler.schedule()
    assert (snapshot(scheduler.manager), scheduler.counts()) == before
    assert len(scheduler.schedule().rows) == 100
    assert scheduler.check() == []
