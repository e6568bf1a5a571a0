"""Publishes events of the radix cache over ZeroMQ, as vLLM and SGLang do (`--kv-events-config`).

A message has three frames: topic, number (8 bytes, big endian), and the batch in msgpack: [time, events, rank].
A DEALER socket that sends an empty frame and a number to `replay_endpoint` gets the kept batches from there on,
each as an empty frame, number and batch, then the number -1 with an empty batch.

A thread owns the sockets; the scheduler only puts events in a bounded queue. If the queue is full the batch is dropped:
its number is missing, so subscribers notice.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque

import msgspec
import zmq

from moe_engine.config.kv_events import KVEventsConfig
from moe_engine.processes.watched_thread import start_watched
from moe_engine.processes.zmq_sockets import bind
from moe_engine.scheduler.kv_cache.kv_events import KVEventLog

END = (-1).to_bytes(8, "big", signed=True)
POLL_MS = 50
LINGER_MS = 500


class KVEventPublisher:
    """
    Args:
        rank: of the attention group; its ports are the configured ones plus the rank.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(self, config: KVEventsConfig, log: KVEventLog, rank: int = 0) -> None:
        self._config = config
        self._log = log
        self._rank = rank
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self.num_dropped = 0
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self.endpoint = bind(self._pub, config.endpoint_of(config.endpoint, rank), flag="--kv-events-config endpoint")
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            address = config.endpoint_of(config.replay_endpoint, rank)
            self.replay_endpoint = bind(self._replay, address, flag="--kv-events-config replay_endpoint")
        self._thread = start_watched("KV events", self._run, lambda message: None)

    def flush(self) -> None:
        """Sends the events that the cache has collected, as one batch; on the core's thread."""
        events = self._log.take()
        if not events:
            return
        number, self._next = self._next, self._next + 1
        batch = msgspec.msgpack.encode((time.time(), events, self._rank))
        try:
            self._queue.put_nowait((number, batch))
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Sends the queued batches and ends the thread."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=1)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        topic = self._config.topic.encode()
        try:
            while True:
                if self._replay is not None:
                    self._answer_replays(self._replay)
                try:
                    item = self._queue.get(timeout=POLL_MS / 1000)
                except queue.Empty:
                    continue
                if item is None:
                    return
                number, batch = item
                self._kept.append(item)
                self._pub.send_multipart([topic, number.to_bytes(8, "big"), batch])
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _answer_replays(self, socket: zmq.Socket[bytes]) -> None:
        while socket.poll(0):
            frames = socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a request for a replay
            peer, first = frames[0], int.from_bytes(frames[2], "big")
            for number, batch in self._kept:
                if number >= first:
                    socket.send_multipart([peer, b"", number.to_bytes(8, "big"), batch])
            socket.send_multipart([peer, b"", END, b""])
