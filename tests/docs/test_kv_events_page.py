"""The page about KV events: its reader reads, and it names every key of the configuration."""

import time
from contextlib import closing

from paged import BlockManager
from paged.serving.kv_config import KvEventsConfig
from paged.serving.kv_events import KvEventPublisher
from paged.serving.kv_wire import BlockStored

PAGE = "docs/kv_events.md"
ANY_PORT = "tcp://127.0.0.1:*"


def test_the_reader_of_the_page_knows_what_is_cached(page, fences):
    (program,) = fences(page, "python")
    names = {}
    exec(compile(program, "kv_events.md", "exec"), names)
    manager = BlockManager(8, 4)
    with closing(KvEventPublisher(manager, endpoint=ANY_PORT, replay_endpoint=ANY_PORT)) as publisher:
        row = manager.add(range(10))
        manager.allocate([row], [10])
        manager.confirm()
        publisher.publish(time.time())
        assert names["cached_tokens"](publisher.endpoint, publisher.replay_endpoint, range(20)) == 8
    manager.free([row])


def test_the_page_names_every_key_and_every_field_and_the_defaults(page):
    assert [key for key in KvEventsConfig.__struct_fields__ if f"| `{key}` |" not in page] == []
    assert [field for field in BlockStored.__struct_fields__ if f'"{field}": ' not in page] == []
    default = KvEventsConfig()
    for key in ("buffer_steps", "hwm", "max_queue_size"):
        assert f"| `{key}` | {getattr(default, key):,} |" in page
    assert f"| `endpoint` | `{default.endpoint}` |" in page
