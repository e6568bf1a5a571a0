"""Events of the radix cache: an index built from events equals the cache's content; messages have vLLM's format."""

from __future__ import annotations

import time

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.config.args import EngineArgs
from moe_engine.config.kv_events import KVEventsConfig, parse_kv_events
from moe_engine.core.kv_event_publisher import END, KVEventPublisher
from moe_engine.errors import ConfigError
from moe_engine.planning.flags.validate import check
from moe_engine.scheduler.kv_cache.kv_events import KVEventLog
from moe_engine.scheduler.kv_cache.prefix_keys import bigrams
from moe_engine.scheduler.kv_cache.radix_cache import Node, RadixCache
from moe_engine.scheduler.tiers.tiered_cache import TieredCache
from tests.examples import examples
from tests.scheduler.kv_subscriber import BlockIndex, decode


def content(cache: RadixCache, of: object = None) -> list[tuple[int, ...]]:
    """The tokens up to the end of each page on the device, sorted."""
    found: list[tuple[int, ...]] = []

    def walk(node: Node, before: tuple[int, ...]) -> None:
        tokens = (*before, *(key >> 32 if of == "pairs" else key for key in node.tokens))
        found.extend(tokens[: end + cache.page_size] for end in range(len(before), len(tokens), cache.page_size))
        for child in node.children.values():
            walk(child, tokens)

    for root in cache.roots.values():
        walk(root, ())
    return sorted(found)


def apply(index: BlockIndex, log: KVEventLog) -> None:
    index.apply(decode(msgspec.msgpack.encode((0.0, log.take(), 0))).events)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(0, 1)),
        st.tuples(st.just("evict"), st.integers(1, 8)),
        st.tuples(st.just("forget"), st.lists(st.integers(0, 2), min_size=1, max_size=8)),
        st.tuples(st.just("flush")),
    ),
    max_size=30,
)


@settings(max_examples=examples(60))
@given(actions=ACTIONS, page_size=st.integers(1, 3), tiered=st.booleans(), pairs=st.booleans())
def test_an_index_of_the_events_is_the_content(actions: list[tuple], page_size: int, tiered: bool, pairs: bool) -> None:
    places = iter(range(1 << 30))
    cache: RadixCache
    if tiered:
        store = lambda slots: [next(places) for _ in slots] if len(slots) % 2 else None  # noqa: E731
        cache = TieredCache(page_size, lambda slots, step: None, store, lambda places: None)
    else:
        cache = RadixCache(page_size, lambda slots, step: None)
    log = cache.events = KVEventLog(page_size, pairs)
    index = BlockIndex()
    for action in actions:
        if action[0] == "insert":
            tokens = bigrams(action[1]) if pairs else action[1]
            root = cache.root((action[2], None) if action[2] else None)
            cache.insert(root, tokens, list(range(len(tokens))), 0)
        elif action[0] == "evict":
            cache.evict(action[1])
        elif action[0] == "forget" and not tiered:
            cache.forget(bigrams(action[1]) if pairs else action[1], 0)
        elif action[0] == "flush":
            cache.flush()
        apply(index, log)
        assert index.prefixes() == content(cache, "pairs" if pairs else None)


def test_a_loaded_prefix_is_stored_again() -> None:
    cache = TieredCache(1, lambda slots, step: None, lambda slots: slots[:], lambda places: None)
    log, index = KVEventLog(1), BlockIndex()
    cache.events = log
    cache.insert(cache.root(), [1, 2, 3], [0, 1, 2], 0)
    cache.evict(3)
    apply(index, log)
    assert not index.blocks
    path = cache.begin_load(cache.root(), [1, 2, 3, 4], 3, 1)
    cache.fill(path, [5, 6, 7])
    apply(index, log)
    assert not index.blocks
    cache.end_load(path, 0)
    apply(index, log)
    assert index.prefixes() == [(1,), (1, 2), (1, 2, 3)]


def test_namespaces_have_hashes_of_their_own() -> None:
    cache = RadixCache(1, lambda slots, step: None)
    log = cache.events = KVEventLog(1)
    for namespace in (None, "tenant", (7, None)):
        cache.insert(cache.root(namespace), [1, 2], [0, 1], 0)
    events = decode(msgspec.msgpack.encode((0.0, log.take(), 0))).events
    assert len({block for event in events for block in event.block_hashes}) == 6  # type: ignore[union-attr]
    assert [event.lora_id for event in events] == [None, None, 7]  # type: ignore[union-attr]


def test_subscribers_get_batches_and_replays() -> None:
    log, index = KVEventLog(2), BlockIndex()
    cache = RadixCache(2, lambda slots, step: None)
    cache.events = log
    config = KVEventsConfig(
        endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", topic="kv", buffer_steps=4
    )
    publisher, context = KVEventPublisher(config, log, 3), zmq.Context()
    subscriber, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        subscriber.connect(publisher.endpoint)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        assert publisher.replay_endpoint is not None
        replay.connect(publisher.replay_endpoint)
        replay.rcvtimeo = 10_000
        seen: list[int] = []
        deadline, token = time.monotonic() + 20, 0
        while len(seen) < 3 and time.monotonic() < deadline:  # until the subscription has arrived
            cache.insert(cache.root(), [token, token], [0, 1], 0)
            token += 1
            publisher.flush()
            publisher.flush()  # no events to send
            if subscriber.poll(100):
                topic, number, batch = subscriber.recv_multipart()
                assert topic == b"kv" and decode(batch).data_parallel_rank == 3
                seen.append(int.from_bytes(number, "big"))
        assert seen == list(range(seen[0], seen[0] + 3))
        last = seen[-1]
        replay.send_multipart([b"", (last - 1).to_bytes(8, "big")])
        numbers = []
        while (frames := replay.recv_multipart())[1] != END:
            numbers.append(int.from_bytes(frames[1], "big"))
            index.apply(decode(frames[2]).events)
        assert numbers[:2] == [last - 1, last]
        assert index.prefixes()[:2] == [(last - 1,) * 2, (last,) * 2]
    finally:
        publisher.close()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "kv-events-config"),
        ('{"publisher": "kafka"}', "publisher 'kafka': zmq or null"),
        ('{"endpoint": "http://a"}', "endpoint 'http://a'"),
        ('{"port": 1}', "unknown field"),
        ('{"hwm": 0}', "hwm 0: at least 1"),
    ],
)
def test_wrong_configurations_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(EngineArgs.from_cli(["--kv-events-config", text]))


def test_combinations_are_refused() -> None:
    for more in (["--disable-radix-cache"], ["--dp-size", "2"]):
        with pytest.raises(ConfigError, match="--kv-events-config"):
            check(EngineArgs.from_cli(["--kv-events-config", "{}", *more]))
    assert parse_kv_events('{"publisher": "null"}') is None
    assert KVEventsConfig().endpoint_of("tcp://*:5557", 2) == "tcp://*:5559"
