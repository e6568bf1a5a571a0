"""A fake core behind a real `CoreClient`: one token per step for each request, endings one step late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from moe_engine.core import messages
from moe_engine.frontend.client import CoreClient
from moe_engine.frontend.frontend import Frontend
from tests.distributed.engine.test_client import FakeCore, client_of
from tests.tokenizer.tiny_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
STOP = " stop"


def words_of(prompt: list[int]) -> str:
    """The core's answer to a prompt: the prompt's number, a stop string, and further text."""
    return f"This is request {prompt[0]}.{STOP} It goes on."


class DelayedCore:
    """Answers every request with the tokens of `words_of(prompt)`, one per step, repeatedly.

    Like a core with a step in flight, it ends an aborted request after the next step, whose tokens are still sent.
    """

    def __init__(self, core: FakeCore, groups: int = 1) -> None:
        self.core = core
        self.groups = groups
        self.live: dict[str, tuple[messages.AddRequest, int]] = {}
        """Id -> the request and its group."""
        self.aborting: dict[str, str] = {}
        self.sent: dict[str, int] = {}
        self.received: list[messages.AddRequest] = []
        self.aborted: list[str] = []
        self.steps = 0

    def step(self) -> None:
        """Ends requests aborted before the last step, sends tokens, then reads its messages."""
        self.steps += 1
        for group in range(self.groups):
            deltas = [self._delta(request) for request, where in list(self.live.values()) if where == group]
            if deltas:
                self.core.send(messages.StepOutput(deltas, group))
        for group in range(self.groups):
            while self.core._inboxes[group].poll(0):
                self._take(messages.decode_to_core(self.core._inboxes[group].recv()), group)

    def _delta(self, request: messages.AddRequest) -> messages.RequestDelta:
        rid = request.rid
        if rid in self.aborting:
            del self.live[rid]
            finish = {"type": "abort", "message": self.aborting.pop(rid), "status_code": None}
            return messages.RequestDelta(rid, [], finish)
        tokens = TOKENIZER.encode(words_of(request.prompt_ids), False)
        token = tokens[self.sent[rid] % len(tokens)]
        self.sent[rid] += 1
        finish = None
        if self.sent[rid] >= request.max_new_tokens:
            finish = {"type": "length", "length": self.sent[rid]}
            del self.live[rid]
        return messages.RequestDelta(rid, [token], finish)

    def _take(self, message: messages.ToCore, group: int) -> None:
        if isinstance(message, messages.AddRequest):
            self.received.append(message)
            if message.rid in self.live:
                finish = {"type": "abort", "message": "rid is already in use", "status_code": 400}
                self.core.send(messages.StepOutput([messages.RequestDelta(message.rid, [], finish)], group))
                return
            self.live[message.rid] = message, group
            self.sent[message.rid] = len(message.generated_ids)
        elif isinstance(message, messages.AddRequests):
            for request in message.requests:
                self._take(request, group)
        elif isinstance(message, messages.AbortRequest):
            self.aborted += message.rids
            self.aborting.update({rid: message.reason for rid in message.rids if rid in self.live})
        elif isinstance(message, messages.Call):
            self.core.send(messages.Reply(message.id, value={"group": group}))

    async def run(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0.0005)


@asynccontextmanager
async def front_end(folder: Path, groups: int = 1) -> AsyncIterator[tuple[Frontend, CoreClient, DelayedCore]]:
    """A frontend over a core that steps by itself."""
    async with client_of(folder, groups) as (client, (core,)):
        room = 1 << 20
        client.info = replace(client.info, context_len=room, max_total_num_tokens=room, max_req_input_len=room)
        played = DelayedCore(core, groups)
        task = asyncio.create_task(played.run())
        try:
            yield Frontend(client, TOKENIZER), client, played
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
