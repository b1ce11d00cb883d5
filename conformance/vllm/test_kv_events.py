"""KV events of ours read by vLLM's own classes, and those of vLLM's own publisher read by ours."""

import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

zmq = pytest.importorskip("zmq")
theirs = pytest.importorskip("vllm.distributed.kv_events")

from paged.serving.kv_events import KvEventPublisher  # noqa: E402
from paged.serving.kv_index import KvIndex  # noqa: E402
from paged.serving.kv_subscriber import KvSubscriber  # noqa: E402
from paged.serving.settings import KvEventsConfig  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "serving"))
from tiny_engine import TinyEngine, shown  # noqa: E402

A, B = list(range(9)), list(range(100, 109))


def test_vllms_classes_read_what_ours_publishes():
    engine = TinyEngine(num_blocks=3, block_size=4, host_blocks=2)
    read = msgspec.msgpack.Decoder(theirs.KVEventBatch).decode
    address = "tcp://127.0.0.1:*"
    config = KvEventsConfig(endpoint=address, replay_endpoint=address)
    with closing(KvEventPublisher(engine.manager, config, rank=2)) as publisher:
        for number, prompt in enumerate((A, B)):
            engine.serve(prompt, salt="a", adapter="sql")
            publisher.publish(float(number))
        with zmq.Context.instance().socket(zmq.DEALER) as one:
            one.connect(publisher.replay_endpoint)
            one.send_multipart([b"", (0).to_bytes(8, "big")])
            payloads = [one.recv_multipart()[3] for _ in range(3)]
    assert payloads.pop() == b""
    first, second = map(read, payloads)
    assert (first.ts, first.data_parallel_rank, second.ts) == (0.0, 2, 1.0)
    cleared, stored = first.events
    assert isinstance(cleared, theirs.AllBlocksCleared) and isinstance(stored, theirs.BlockStored)
    assert (stored.parent_block_hash, stored.token_ids, stored.block_size) == (None, A[:8], 4)
    assert (stored.medium, stored.lora_name, stored.lora_id) == (theirs.MEDIUM_GPU, "sql", None)
    (name, digest), rest = stored.extra_keys
    assert (name, len(digest), rest) == ("sql", 16, ("sql",))
    events = [(type(event).__name__, event.medium) for event in second.events]
    media = (theirs.MEDIUM_GPU, theirs.MEDIUM_CPU, theirs.MEDIUM_GPU)
    assert events == list(zip(("BlockRemoved", "BlockStored", "BlockStored"), media, strict=True))
    # What vLLM writes of the same events is the same bytes.
    assert [msgspec.msgpack.encode(batch) for batch in (first, second)] == payloads


def test_vllms_replay_read_by_ours_gives_its_index(tmp_path):
    endpoint, replay = f"ipc://{tmp_path}/new", f"ipc://{tmp_path}/replay"
    publisher = theirs.ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay, buffer_steps=100)
    try:
        for number in range(5):
            stored = theirs.BlockStored([bytes([number]) * 32], None, [number] * 4, 4, None, "GPU", None, group_idx=0)
            removed = [theirs.BlockRemoved([bytes([number - 1]) * 32], "GPU", group_idx=0)] if number % 2 else []
            publisher.publish(theirs.KVEventBatch(ts=time.time(), events=[*removed, stored]))
        index = KvIndex()
        with KvSubscriber(endpoint, replay) as subscriber:
            for _ in range(100):
                for seq, batch in subscriber.take(0.1):
                    assert index.apply(seq, batch)
                if index.next_seq == 5:
                    break
        assert shown(index) == {"GPU": {bytes([number]) * 32 for number in (1, 3, 4)}, "CPU": set()}
    finally:
        publisher.shutdown()
