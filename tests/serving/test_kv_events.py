"""KV events over sockets: what is on the wire, what is told again, and a reader that has the engine's index whatever it lost."""

from __future__ import annotations

import json
import random
import socket
import time
from contextlib import closing, contextmanager
from threading import Thread
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

zmq = pytest.importorskip("zmq")

from paged import BlockManager  # noqa: E402
from paged.errors import (  # noqa: E402
    InvalidConfig,
    PublisherFailed,
    UnusableEndpoint,
)
from paged.serving.kv_config import KvEventsConfig  # noqa: E402
from paged.serving.kv_events import KvEventPublisher, configured_publisher, of_rank  # noqa: E402
from paged.serving.kv_index import KvIndex  # noqa: E402
from paged.serving.kv_subscriber import KvSubscriber  # noqa: E402

from .tiny_engine import TinyEngine, shown  # noqa: E402, TID252

ANY_PORT = "tcp://127.0.0.1:*"
END = b"\xff" * 8
A, B = list(range(9)), list(range(100, 109))


# As vLLM 0.32 declares them (vllm/distributed/kv_events.py), and refusing what these do not have.
class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


read = msgspec.msgpack.Decoder(KVEventBatch).decode


@contextmanager
def publisher_of(engine, **options):
    options = {"endpoint": ANY_PORT, "replay_endpoint": ANY_PORT} | options
    with closing(KvEventPublisher(engine.manager, **options)) as publisher:
        yield publisher


@contextmanager
def dealer(publisher, kind=zmq.DEALER, **options):
    with zmq.Context.instance().socket(kind) as one:
        one.linger = 0
        for name, value in options.items():
            setattr(one, name, value)
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


def follow(subscriber, index):
    """Apply all that there is."""
    for _ in range(60_000):
        batches = subscriber.take(0.01)
        for seq, batch in batches:
            assert index.apply(seq, batch)
        if not batches and subscriber.is_current:
            return
    raise AssertionError("no end of batches")


def test_a_batch_on_the_wire_is_vllms():
    engine = TinyEngine(num_blocks=3, block_size=4, host_blocks=2)
    with publisher_of(engine, topic="kv@engine", rank=3) as publisher, dealer(publisher) as one:
        publisher.publish(1.5)
        engine.serve(A)
        publisher.publish(2.5)
        # vLLM's: the low 64 bits of the bytes as one big-endian number.
        published = {int.from_bytes(key, "big") % 2**64 for key in engine.contents(bytes)["GPU"]}
        engine.serve(B)
        publisher.publish(3.5)
        topics, numbers, payloads = zip(*replayed(one, 0), strict=True)
    assert (set(topics), numbers) == ({b"kv@engine"}, (0, 1, 2))
    first, second, third = map(read, payloads)
    assert first == KVEventBatch(1.5, [AllBlocksCleared()], 3)
    hashes = second.events[0].block_hashes
    assert set(hashes) == published
    assert second == KVEventBatch(2.5, [BlockStored(hashes, None, A[:8], 4, None, "GPU", None)], 3)
    told = [(type(event).__name__, event.medium) for event in third.events]
    assert told == [("BlockRemoved", "GPU"), ("BlockStored", "CPU"), ("BlockStored", "GPU")]
    assert msgspec.msgpack.decode(payloads[1])[1][0].keys() == {"type", *BlockStored.__struct_fields__[:7]}


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


def test_what_is_new_comes_by_itself_and_silent_steps_send_nothing():
    engine = TinyEngine()
    with publisher_of(engine) as publisher, zmq.Context.instance().socket(zmq.SUB) as sub, dealer(publisher) as one:
        sub.linger = 0
        sub.subscribe(b"")
        sub.connect(publisher.endpoint)
        publisher.publish(0.0)
        prompt = 0
        while not sub.poll(20):
            # The subscription is under way until one comes.
            prompt += 1
            engine.serve([prompt] * 5)
            publisher.publish(float(prompt))
        for _ in range(5):
            publisher.publish(99.0)
        engine.serve(A)
        publisher.publish(100.0)
        message = received(sub)
        while read(message[2]).ts < 100:
            message = received(sub)
        assert replayed(one, prompt + 1) == [(b"", prompt + 1, message[2])]


def test_a_number_that_is_kept_is_answered_with_what_was_published_from_there_on():
    engine = TinyEngine()
    with publisher_of(engine, buffer_steps=3) as publisher, dealer(publisher) as one:
        for number in range(6):
            engine.serve([number] * 5)
            publisher.publish(float(number))
        assert [seq for _, seq, _ in replayed(one, 4)] == [4, 5]
        assert [read(payload).ts for _, _, payload in replayed(one, 3)] == [3.0, 4.0, 5.0]
        assert replayed(one, 6) == replayed(one, 2**64 - 1) == []


def test_a_number_that_is_not_kept_is_answered_with_all_that_is_held_under_the_latest_number():
    engine = TinyEngine()
    with publisher_of(engine, buffer_steps=3) as publisher, dealer(publisher) as one:
        for number in range(20):
            engine.serve([number] * 5)
            publisher.publish(float(number))
        ((_, seq, payload),) = replayed(one, 16)
        assert replayed(one, 0) == [(b"", seq, payload)]
    batch = read(payload)
    assert (seq, batch.ts, batch.events[0]) == (19, 19.0, AllBlocksCleared())
    held = {medium: set() for medium in ("GPU", "CPU")}
    for stored in batch.events[1:]:
        held[stored.medium] |= set(stored.block_hashes)
    assert held == engine.contents() and held["CPU"]


def test_a_client_of_kind_req_gets_the_batch_that_it_asks_for():
    engine = TinyEngine()
    with publisher_of(engine) as publisher, dealer(publisher, zmq.REQ) as one:
        engine.serve(A)
        publisher.publish(0.0)
        one.send((0).to_bytes(8, "big"))
        topic, seq, payload = received(one)
        assert (topic, int.from_bytes(seq, "big"), len(read(payload).events)) == (b"", 0, 2)


def test_a_salt_is_nowhere_and_namespaces_are_told_apart():
    engine = TinyEngine()
    with publisher_of(engine) as publisher, dealer(publisher) as one:
        for options in ({"salt": "s3cret"}, {"salt": "other"}, {"salt": "s3cret", "adapter": "sql"}, {}):
            engine.serve(A, **options)
            publisher.publish(0.0)
        answers = replayed(one, 0)
    payloads = [payload for _, _, payload in answers]
    assert not any(b"s3cret" in payload for payload in payloads)
    one, two, three, four = (read(payload).events[-1] for payload in payloads)
    ((first,), rest) = one.extra_keys
    assert len(first) == 16 and rest is None and int(first, 16)
    assert two.extra_keys not in (one.extra_keys, [(first,), None])
    (name, digest), rest = three.extra_keys
    assert (name, rest, three.lora_name) == ("sql", ("sql",), "sql") and digest != first
    assert (four.extra_keys, four.lora_name) == (None, None)


def test_requests_that_are_none_are_passed_over_and_the_next_is_answered():
    engine = TinyEngine()
    with publisher_of(engine) as publisher, dealer(publisher) as one, dealer(publisher) as large:
        publisher.publish(0.0)
        for frames in ([b""], [b"", b""], [b"", b"1234567"], [b"", b"123456789"], [b"x", b"12345678"], [b"12345678"]):
            one.send_multipart(frames)
        one.send_multipart([b"", b"12345678", b""])
        large.send_multipart([b"", b"x" * 100_000])
        # Nothing of what came before is answered.
        assert replayed(one, 99) == []
        assert len(replayed(one, 0)) == 1
        with dealer(publisher) as other:
            assert len(replayed(other, 0)) == 1
        publisher.publish(1.0)


def test_bytes_that_are_no_zeromq_leave_the_publisher_as_it_is():
    engine = TinyEngine()
    with publisher_of(engine) as publisher, dealer(publisher) as one:
        for endpoint in (publisher.endpoint, publisher.replay_endpoint):
            host, port = endpoint.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 10)
        publisher.publish(0.0)
        assert len(replayed(one, 0)) == 1


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
    assert numbers == list(range(num_batches))
    assert engine.manager.device.num_used == 0


def test_readers_that_leave_in_the_middle_of_an_answer_are_forgotten():
    engine = TinyEngine()
    with publisher_of(engine) as publisher:
        for number in range(300):
            engine.serve([number] * 5)
            publisher.publish(float(number))
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
        serve_and_publish(engine, publisher, 20, first=1)
        follow(subscriber, index)
        assert index.next_seq == 1
        publisher._max_queue_size = room
        publisher.publish(21.0)
        follow(subscriber, index)
        assert (shown(index), index.next_seq) == (engine.contents(), 2)


class Lossy:
    """Passes what is published on, and loses some of it: a thread between a publisher and its readers."""

    def __init__(self, endpoint, seed):
        self._random = random.Random(seed)
        context = zmq.Context.instance()
        self._sub, self._pub = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._stop, self._stopped = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stop.bind(f"inproc://stop-{id(self)}")
        self._stopped.connect(f"inproc://stop-{id(self)}")
        for one in (self._sub, self._pub):
            one.linger = 0
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self._pub.bind(ANY_PORT)
        self.endpoint = self._pub.last_endpoint.rstrip(b"\0").decode()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self):
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while self._stopped not in (ready := dict(poller.poll())):
            message = self._sub.recv_multipart()
            assert self._sub in ready
            fate = self._random.random()
            if fate < 0.6:
                self._pub.send_multipart(message)
            elif fate < 0.7:
                self._pub.send_multipart([message[0], b"garbage", b"\xc1"])
            elif fate < 0.8:
                self._pub.send_multipart([*message[:2], b"\xc1"])

    def close(self):
        self._stop.send(b"")
        self._thread.join()
        for one in (self._sub, self._pub, self._stop, self._stopped):
            one.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_that_loses_messages_or_comes_late_has_what_the_engine_holds(seed):
    draw = random.Random(seed)
    engine, readers = TinyEngine(), []
    with publisher_of(engine, buffer_steps=draw.choice([1, 5, 50])) as publisher:  # noqa: SIM117
        with closing(Lossy(publisher.endpoint, seed)) as lossy:
            try:
                for number in range(150):
                    if draw.random() < 0.4:
                        salt = draw.choice([None, "a"])
                        engine.add(
                            [draw.randrange(2) for _ in range(draw.randint(1, 24))], draw.randint(1, 9), salt=salt
                        )
                    engine.step()
                    publisher.publish(float(number))
                    if number in (0, 70):
                        readers.append((KvSubscriber(lossy.endpoint, publisher.replay_endpoint), KvIndex()))
                    if draw.random() < 0.1:
                        for reader, index in readers:
                            follow(reader, index)
                            assert shown(index) == engine.contents()
                publisher.publish(1000.0)
                for reader, index in readers:
                    follow(reader, index)
                    assert shown(index) == engine.contents()
                assert engine.contents()["CPU"]
            finally:
                for reader, _ in readers:
                    reader.close()


@contextmanager
def begun_again(engine, publisher):
    """Another publisher where this one was, which has ended."""
    with publisher_of(
        engine, endpoint=publisher.endpoint.replace("127.0.0.1", "*"), replay_endpoint=publisher.replay_endpoint
    ) as other:
        yield other


def serve_and_publish(engine, publisher, num_prompts, first=0):
    for number in range(first, first + num_prompts):
        engine.serve([number] * 5)
        publisher.publish(float(number))


@pytest.mark.parametrize("num_prompts", [1, 3, 5, 8])
def test_an_engine_that_begins_again_at_the_same_address_is_noticed_wherever_its_numbers_are(num_prompts):
    first, second, index = TinyEngine(), TinyEngine(), KvIndex()
    with publisher_of(first) as publisher:
        serve_and_publish(first, publisher, 5)
        subscriber = KvSubscriber(publisher.endpoint, publisher.replay_endpoint, patience=0.2)
        follow(subscriber, index)
        assert shown(index) == first.contents()
    with subscriber, begun_again(second, publisher) as other:
        serve_and_publish(second, other, num_prompts, first=50)
        for _ in range(3_000):
            follow(subscriber, index)
            if shown(index) == second.contents():
                break
        assert shown(index) == second.contents()
        assert index.next_seq == num_prompts


def test_a_connection_that_is_made_again_is_a_doubt_before_any_message():
    first, second, index = TinyEngine(), TinyEngine(), KvIndex()
    with publisher_of(first) as publisher:
        serve_and_publish(first, publisher, 5)
        subscriber = KvSubscriber(publisher.endpoint, publisher.replay_endpoint)
        follow(subscriber, index)
    with subscriber, begun_again(second, publisher) as other:
        serve_and_publish(second, other, 5, first=50)
        # Ten minutes of silence would tell, too.
        began = time.monotonic()
        for seq, batch in subscriber.take(600):
            assert index.apply(seq, batch)
        assert time.monotonic() - began < 590
        assert shown(index) == second.contents()


def test_what_is_in_the_queue_is_sent_before_the_end_and_after_it_nothing_is():
    engine = TinyEngine()
    publisher = KvEventPublisher(engine.manager, endpoint=ANY_PORT)
    with zmq.Context.instance().socket(zmq.SUB) as sub:
        sub.linger = 0
        sub.subscribe(b"")
        sub.connect(publisher.endpoint)
        number = 0
        while not sub.poll(20):
            engine.serve([number] * 5)
            publisher.publish(float(number))
            number += 1
        serve_and_publish(engine, publisher, 50, first=number)
        publisher.close()
        publisher.close()
        while read(received(sub)[2]).ts < number + 49:
            pass
        assert not sub.poll(0)
    with pytest.raises(PublisherFailed):
        publisher.publish(0.0)


def test_an_address_that_is_taken_or_is_none_is_named():
    manager = BlockManager(4, 4)
    with closing(KvEventPublisher(manager, endpoint=ANY_PORT, replay_endpoint=ANY_PORT)) as publisher:
        with pytest.raises(
            UnusableEndpoint, match=r"127.0.0.1.*: Address already in use. An address to bind is"
        ) as found:
            KvEventPublisher(manager, endpoint=ANY_PORT, replay_endpoint=publisher.replay_endpoint)
        assert found.value.endpoint == publisher.replay_endpoint
    for endpoint in ("nowhere", "tcp://*:x", "inproc://here", "ipc:///no/such/folder"):
        with pytest.raises(UnusableEndpoint):
            KvEventPublisher(manager, endpoint=endpoint)


def test_an_address_without_a_wildcard_is_connected_to():
    engine = TinyEngine()
    with zmq.Context.instance().socket(zmq.SUB) as sub:
        sub.linger = 0
        sub.subscribe(b"")
        sub.bind(ANY_PORT)
        endpoint = sub.last_endpoint.rstrip(b"\0").decode()
        with publisher_of(engine, endpoint=endpoint, replay_endpoint=None) as publisher:
            assert (publisher.endpoint, publisher.replay_endpoint) == (endpoint, None)
            number = 0
            while not sub.poll(20):
                engine.serve([number] * 5)
                publisher.publish(float(number))
                number += 1


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 2, "tcp://*:5559"),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558"),
        ("tcp://127.0.0.1:*", 2, "tcp://127.0.0.1:*"),
        ("tcp://*:0", 2, "tcp://*:0"),
        ("ipc:///tmp/events", 1, "ipc:///tmp/events_dp1"),
    ],
)
def test_replicas_have_addresses_of_their_own(endpoint, rank, expected):
    assert of_rank(endpoint, rank) == expected


def test_the_configuration_is_vllms(tmp_path):
    given = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "buffer_steps": 5,
        "hwm": 6,
        "max_queue_size": 7,
        "topic": "t",
    }
    given |= {"endpoint": f"ipc://{tmp_path}/a", "replay_endpoint": f"ipc://{tmp_path}/b"}
    config = KvEventsConfig.read(json.dumps(given))
    publisher = configured_publisher(config, BlockManager(4, 4), rank=1)
    assert publisher is not None
    with closing(publisher):
        assert (publisher.endpoint, publisher.replay_endpoint) == (f"ipc://{tmp_path}/a_dp1", f"ipc://{tmp_path}/b_dp1")
    assert KvEventsConfig.of(given) == config
    assert KvEventsConfig.read("{}") == KvEventsConfig()
    for off in ("{}", '{"enable_kv_cache_events": false}', '{"enable_kv_cache_events": true, "publisher": "null"}'):
        assert configured_publisher(KvEventsConfig.read(off), BlockManager(4, 4)) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "Expected `object`, got `array`"),
        ('{"enabled": true}', "unknown field `enabled`"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"buffer_steps": 0}', ">= 1 - at `$.buffer_steps`"),
        ('{"endpoint": 5557}', "Expected `str`, got `int` - at `$.endpoint`"),
    ],
)
def test_a_configuration_that_is_none_is_told_with_what_is_known(text, problem):
    with pytest.raises(InvalidConfig, match="any of enable_kv_cache_events, publisher, endpoint") as found:
        KvEventsConfig.read(text)
    assert problem in str(found.value)
    with pytest.raises(InvalidConfig, match="a JSON object; got"):
        KvEventsConfig.read(text[:-1])
