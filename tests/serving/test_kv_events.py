"""KV events over sockets: what is on the wire, what is told again, and a reader that has the engine's index whatever it lost."""

import json
import socket
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq

from paged import BlockManager
from paged.errors import PublisherFailed, UnusableEndpoint
from paged.serving.kv_events import KvEventPublisher, bound_to, configured_publisher, of_rank
from paged.serving.kv_index import KvIndex
from paged.serving.kv_subscriber import KvSubscriber
from paged.serving.kv_wire import decoded
from paged.serving.settings import KvEventsConfig

from .tiny_engine import TinyEngine, shown  # noqa: TID252

ANY_PORT = "tcp://127.0.0.1:*"
END = b"\xff" * 8
A, B = list(range(9)), list(range(100, 109))


@contextmanager
def publisher_of(engine, rank=0, **options):
    config = KvEventsConfig(**{"endpoint": ANY_PORT, "replay_endpoint": ANY_PORT} | options)
    with closing(KvEventPublisher(engine.manager, config, rank)) as publisher:
        yield publisher


@contextmanager
def opened(kind, **options):
    """A socket of this kind, which hears everything if it is a SUB."""
    with zmq.Context.instance().socket(kind) as one:
        one.linger = 0
        if kind == zmq.SUB:
            one.subscribe(b"")
        for name, value in options.items():
            setattr(one, name, value)
        yield one


@contextmanager
def dealer(publisher, kind=zmq.DEALER, **options):
    with opened(kind, **options) as one:
        one.connect(publisher.replay_endpoint)
        yield one


def received(one):
    assert one.poll(600_000), "nothing came"
    return one.recv_multipart()


def replayed(one, start):
    """What is answered, without its end, as (topic, number, payload)."""
    one.send_multipart([b"", start.to_bytes(8, "big")])
    found = []
    while True:
        delimiter, topic, seq, payload = received(one)
        assert delimiter == b""
        if seq == END:
            assert (topic, payload) == (b"", b"")
            return found
        found.append((topic, int.from_bytes(seq, "big"), payload))


def serve_and_publish(engine, publisher, numbers):
    """A prompt and a batch of events for each of these, which is its time, too."""
    for number in numbers:
        engine.serve([number] * 5)
        publisher.publish(float(number))


def publish_until_heard(engine, publisher, sub):
    """Publish until a subscription that is under way is there; how many batches that took."""
    num = 0
    while not sub.poll(20):
        serve_and_publish(engine, publisher, [num])
        num += 1
    return num


def follow(subscriber, index):
    for _ in range(60_000):
        batches = subscriber.take(0.01)
        for seq, batch in batches:
            assert index.apply(seq, batch)
        if not batches and subscriber.is_current:
            return
    raise AssertionError("no end of batches")


def test_a_batch_on_the_wire_is_vllms_and_silent_steps_send_none():
    engine = TinyEngine(num_blocks=3, block_size=4, host_blocks=2)
    with publisher_of(engine, topic="kv@engine", rank=3) as publisher, dealer(publisher) as one:
        publisher.publish(1.5)
        engine.serve(A)
        publisher.publish(2.5)
        # vLLM's: the low 64 bits of the bytes as one big-endian number.
        published = {int.from_bytes(key, "big") % 2**64 for key in engine.contents(bytes)["GPU"]}
        publisher.publish(3.0)
        engine.serve(B)
        publisher.publish(3.5)
        topics, numbers, payloads = zip(*replayed(one, 0), strict=True)
    assert (set(topics), numbers) == ({b"kv@engine"}, (0, 1, 2))
    first, second, third = map(msgspec.msgpack.decode, payloads)
    assert first == [1.5, [{"type": "AllBlocksCleared"}], 3]
    hashes = second[1][0]["block_hashes"]
    stored = {"block_hashes": hashes, "parent_block_hash": None, "token_ids": A[:8], "block_size": 4}
    assert set(hashes) == published
    assert second == [
        2.5, [{"type": "BlockStored"} | stored | {"lora_id": None, "medium": "GPU", "lora_name": None}], 3,
    ]  # fmt: skip
    assert [(event["type"], event["medium"]) for event in third[1]] == [
        ("BlockRemoved", "GPU"), ("BlockStored", "CPU"), ("BlockStored", "GPU"),
    ]  # fmt: skip
    assert third[1][0].keys() == {"type", "block_hashes", "medium"}


def test_whoever_asks_for_whole_hashes_gets_them_and_the_index_answers_by_either():
    for form in ({}, {"use_int_block_hashes": False}):
        engine, index = TinyEngine(num_blocks=3, block_size=4, host_blocks=2), KvIndex()
        config = KvEventsConfig.of({"enable_kv_cache_events": True, "replay_endpoint": ANY_PORT} | form)
        publisher = configured_publisher(msgspec.structs.replace(config, endpoint=ANY_PORT), engine.manager)
        assert publisher is not None
        with closing(publisher), KvSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            engine.serve(A, B)
            publisher.publish(0.0)
            follow(subscriber, index)
        assert shown(index) == (engine.contents(bytes) if form else engine.contents()) and shown(index)["CPU"]
        for prompt in (A, B):
            found = engine.manager.lookup(prompt)
            assert index.hits(prompt) == (found.num_tokens, found.host_tokens) != (0, 0)


def test_a_number_is_answered_with_what_came_from_there_on_or_if_it_is_not_kept_with_all_that_is_held():
    engine, index = TinyEngine(), KvIndex()
    with publisher_of(engine, buffer_steps=3) as publisher, dealer(publisher) as one:
        serve_and_publish(engine, publisher, range(20))
        assert [(seq, decoded(payload).ts) for _, seq, payload in replayed(one, 17)] == [(17, 17), (18, 18), (19, 19)]
        assert [seq for _, seq, _ in replayed(one, 18)] == [18, 19]
        assert replayed(one, 20) == replayed(one, 2**64 - 1) == []
        # A client of kind REQ gets the batch that it asks for.
        with dealer(publisher, zmq.REQ) as asking:
            asking.send((19).to_bytes(8, "big"))
            topic, seq, payload = received(asking)
        assert (topic, int.from_bytes(seq, "big"), decoded(payload).ts) == (b"", 19, 19.0)
        ((_, seq, payload),) = replayed(one, 16)
        assert replayed(one, 0) == [(b"", seq, payload)]
    batch = decoded(payload)
    assert (seq, batch.ts, batch.begins_anew) == (19, 19.0, True)
    assert index.apply(seq, batch)
    assert shown(index) == engine.contents() and shown(index)["CPU"]


def test_a_salt_is_nowhere_and_namespaces_are_told_apart():
    engine = TinyEngine()
    with publisher_of(engine) as publisher, dealer(publisher) as one:
        for options in ({"salt": "s3cret"}, {"salt": "other"}, {"salt": "s3cret", "adapter": "sql"}, {}):
            engine.serve(A, **options)
            publisher.publish(0.0)
        payloads = [payload for _, _, payload in replayed(one, 0)]
    assert not any(b"s3cret" in payload for payload in payloads)
    one, two, three, four = (msgspec.msgpack.decode(payload)[1][-1] for payload in payloads)
    ((first,), rest) = one["extra_keys"]
    assert len(first) == 16 and rest is None and int(first, 16)
    assert two["extra_keys"] not in (one["extra_keys"], [[first], None])
    (name, digest), rest = three["extra_keys"]
    assert (name, rest, three["lora_name"]) == ("sql", ["sql"], "sql") and digest != first
    assert "extra_keys" not in four and four["lora_name"] is None


def test_what_is_no_request_or_no_zeromq_is_passed_over_and_the_next_request_is_answered():
    engine = TinyEngine()
    with publisher_of(engine) as publisher, dealer(publisher) as one, dealer(publisher) as large:
        for endpoint in (publisher.endpoint, publisher.replay_endpoint):
            host, port = endpoint.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 10)
        publisher.publish(0.0)
        for frames in ([b""], [b"", b""], [b"", b"1234567"], [b"", b"123456789"], [b"x", b"12345678"], [b"12345678"]):
            one.send_multipart(frames)
        one.send_multipart([b"", b"12345678", b""])
        large.send_multipart([b"", b"x" * 100_000])
        # Nothing of what came before is answered.
        assert (replayed(one, 99), len(replayed(one, 0))) == ([], 1)


def test_a_long_answer_comes_whole_to_a_reader_that_takes_it_late():
    engine = SimpleNamespace(manager=BlockManager(600, 64))
    num_batches = 3_000
    with publisher_of(engine) as publisher, dealer(publisher, rcvhwm=1) as slow, dealer(publisher) as one:
        row = engine.manager.add([2**30])
        for number in range(num_batches):
            # 4 MB in all, far more than sockets hold.
            if number % 2:
                engine.manager.free([row])
                engine.manager.reset_cache()
            else:
                row = engine.manager.add(np.arange(512, dtype=np.int32) + 2**30)
                engine.manager.allocate([row], [512])
                engine.manager.confirm()
            publisher.publish(float(number))
        slow.send_multipart([b"", (0).to_bytes(8, "big")])
        # Meanwhile others are answered, and what is new is published.
        assert len(replayed(one, num_batches - 1)) == 1
        publisher.publish(0.0)
        numbers = []
        while (seq := received(slow)[2]) != END:
            numbers.append(int.from_bytes(seq, "big"))
    assert (numbers, engine.manager.device.num_used) == (list(range(num_batches)), 0)


def test_readers_that_leave_in_the_middle_of_an_answer_are_forgotten():
    engine = TinyEngine()
    with publisher_of(engine) as publisher:
        serve_and_publish(engine, publisher, range(300))
        for _ in range(100):
            with dealer(publisher) as gone:
                gone.send_multipart([b"", (0).to_bytes(8, "big")])
                received(gone)
        with dealer(publisher) as one:
            assert len(replayed(one, 0)) == 300


def test_steps_that_find_the_queue_full_are_told_with_a_later_one():
    engine, index = TinyEngine(), KvIndex()
    with publisher_of(engine) as publisher, KvSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
        publisher.publish(0.0)
        # However fast the other thread is: a queue without room is full.
        room, publisher._max_queue_size = publisher._max_queue_size, 0
        serve_and_publish(engine, publisher, range(1, 21))
        follow(subscriber, index)
        assert index.next_seq == 1
        publisher._max_queue_size = room
        publisher.publish(21.0)
        follow(subscriber, index)
        assert (shown(index), index.next_seq) == (engine.contents(), 2)


def test_a_reader_of_messages_that_are_lost_or_garbage_asks_for_them_and_has_what_the_engine_holds():
    engine, index = TinyEngine(), KvIndex()
    with publisher_of(engine) as publisher, dealer(publisher) as one, opened(zmq.PUB) as lossy:
        lossy.bind(ANY_PORT)
        with KvSubscriber(bound_to(lossy), publisher.replay_endpoint) as subscriber:
            publisher.publish(0.0)
            follow(subscriber, index)
            serve_and_publish(engine, publisher, range(1, 20))
            for topic, seq, payload in replayed(one, 1):
                frames = [topic, seq.to_bytes(8, "big"), payload]
                # Of four messages one comes as it is, two are spoilt, and one is lost.
                spoilt = [frames, [topic, b"garbage", b"\xc1"], [*frames[:2], b"\xc1"], None][seq % 4]
                if spoilt:
                    lossy.send_multipart(spoilt)
            follow(subscriber, index)
    assert shown(index) == engine.contents() and shown(index)["CPU"]


@pytest.mark.parametrize("num_prompts", [1, 5, 8])
def test_an_engine_that_begins_again_at_the_same_address_is_noticed_at_once_wherever_its_numbers_are(num_prompts):
    first, second, index = TinyEngine(), TinyEngine(), KvIndex()
    with publisher_of(first) as publisher:
        serve_and_publish(first, publisher, range(5))
        subscriber = KvSubscriber(publisher.endpoint, publisher.replay_endpoint)
        follow(subscriber, index)
        assert shown(index) == first.contents()
    endpoints = {"endpoint": publisher.endpoint.replace("127.0.0.1", "*"), "replay_endpoint": publisher.replay_endpoint}
    with subscriber, publisher_of(second, **endpoints) as other:
        serve_and_publish(second, other, range(50, 50 + num_prompts))
        # Ten minutes of silence would tell, too.
        began = time.monotonic()
        for seq, batch in subscriber.take(600):
            assert index.apply(seq, batch)
        assert time.monotonic() - began < 590
        follow(subscriber, index)
        assert (shown(index), index.next_seq) == (second.contents(), num_prompts)


def test_what_is_in_the_queue_is_sent_before_the_end_and_after_it_nothing_is():
    engine = TinyEngine()
    publisher = KvEventPublisher(engine.manager, KvEventsConfig(endpoint=ANY_PORT))
    with opened(zmq.SUB) as sub:
        sub.connect(publisher.endpoint)
        num = publish_until_heard(engine, publisher, sub)
        serve_and_publish(engine, publisher, range(num, num + 50))
        publisher.close()
        publisher.close()
        while decoded(received(sub)[2]).ts < num + 49:
            pass
        assert not sub.poll(0)
    with pytest.raises(PublisherFailed):
        publisher.publish(0.0)


def test_an_address_that_is_taken_or_is_none_is_named_and_refused_to_a_reader_at_once():
    manager = BlockManager(4, 4)
    with closing(KvEventPublisher(manager, KvEventsConfig(endpoint=ANY_PORT, replay_endpoint=ANY_PORT))) as publisher:
        with pytest.raises(
            UnusableEndpoint, match=r"127.0.0.1.*: Address already in use. An address to bind is"
        ) as found:
            KvEventPublisher(manager, KvEventsConfig(endpoint=ANY_PORT, replay_endpoint=publisher.replay_endpoint))
        assert found.value.endpoint == publisher.replay_endpoint
    for endpoint in ("nowhere", "tcp://*:x", "inproc://here", "ipc:///no/such/folder"):
        with pytest.raises(UnusableEndpoint):
            KvEventPublisher(manager, KvEventsConfig(endpoint=endpoint))
    for addresses in (("nowhere", "tcp://127.0.0.1:1"), ("tcp://127.0.0.1:1", "nowhere")):
        with pytest.raises(zmq.ZMQError):
            KvSubscriber(*addresses)


def test_an_address_without_a_wildcard_is_connected_to():
    engine = TinyEngine()
    with opened(zmq.SUB) as sub:
        sub.bind(ANY_PORT)
        with publisher_of(engine, endpoint=bound_to(sub), replay_endpoint=None) as publisher:
            assert (publisher.endpoint, publisher.replay_endpoint) == (bound_to(sub), None)
            assert publish_until_heard(engine, publisher, sub) > 0


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"), ("tcp://*:5557", 2, "tcp://*:5559"),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558"), ("tcp://127.0.0.1:*", 2, "tcp://127.0.0.1:*"),
        ("tcp://*:0", 2, "tcp://*:0"), ("ipc:///tmp/events", 1, "ipc:///tmp/events_dp1"),
    ],
)  # fmt: skip
def test_replicas_have_addresses_of_their_own(endpoint, rank, expected):
    assert of_rank(endpoint, rank) == expected


def test_the_configuration_is_vllms(tmp_path):
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "buffer_steps": 5, "hwm": 6, "max_queue_size": 7}
    given |= {"topic": "t", "endpoint": f"ipc://{tmp_path}/a", "replay_endpoint": f"ipc://{tmp_path}/b"}
    config = KvEventsConfig.of(json.dumps(given))
    publisher = configured_publisher(config, BlockManager(4, 4), rank=1)
    assert publisher is not None
    with closing(publisher):
        assert (publisher.endpoint, publisher.replay_endpoint) == (f"ipc://{tmp_path}/a_dp1", f"ipc://{tmp_path}/b_dp1")
    assert (KvEventsConfig.of(given), KvEventsConfig.of("{}")) == (config, KvEventsConfig())
    for off in ("{}", '{"enable_kv_cache_events": false}', '{"enable_kv_cache_events": true, "publisher": "null"}'):
        assert configured_publisher(KvEventsConfig.of(off), BlockManager(4, 4)) is None
