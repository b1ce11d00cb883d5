"""How ordinary requests come in: in one call of the memory layer each, and with one draw for all."""

from paged.block_manager import BlockManager, Memory
from paged.block_manager.pool import Pool
from paged.scheduler import Request, Scheduler


def test_what_the_draw_evicts_is_computed_once_for_all_who_come_with_it():
    scheduler = Scheduler(BlockManager(3, 4), policy="vllm")
    for token in (1, 2, 3):
        scheduler.add(Request(id=str(token), prompt=[token] * 4, max_tokens=1))
        scheduler.update(scheduler.schedule(), [9])
    scheduler.add(Request(id="a", prompt=[1] * 4, max_tokens=1))
    scheduler.add(Request(id="b", prompt=[1] * 4 + [2], max_tokens=1))
    assert scheduler.schedule().num_tokens.tolist() == [4, 1]


def test_prompts_shorter_than_a_block_are_drawn_at_once(monkeypatch):
    counts = []
    draw = Pool.draw
    monkeypatch.setattr(Pool, "draw", lambda self, count: counts.append(count) or draw(self, count))
    scheduler = Scheduler(BlockManager(300, 16), policy="fastgen", max_tokens_per_step=4000)
    for number in range(200):
        scheduler.add(Request(id=str(number), prompt=[number] * 10))
    assert len(scheduler.schedule().rows) == 200
    assert counts == [200]


def test_an_ordinary_request_is_admitted_in_one_call(monkeypatch):
    admitted = []
    admit = Memory.admit
    monkeypatch.setattr(Memory, "admit", lambda self, *wish: admitted.append(wish[0].tolist()) or admit(self, *wish))
    scheduler = Scheduler(BlockManager(8, 4))
    scheduler.add(Request(id="plain", prompt=[1, 2]))
    scheduler.add(Request(id="group", prompt=[3, 4], num_sequences=2))
    assert scheduler.schedule().ids.tolist() == ["plain", "group", "group"]
    assert admitted == [[1, 2]]
