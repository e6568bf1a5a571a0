"""Requests of a lost attention group migrate to the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moe_engine.core import messages
from moe_engine.errors import EngineDeadError
from tests.distributed.engine.test_client import ask, client_of, request


async def test_request_of_a_lost_group_migrates_with_its_tokens(tmp_path: Path) -> None:
    async with client_of(tmp_path, 3) as (client, (core,)):
        task = ask(client, "r", 4, lane=1)
        assert (await core.got(1)).generated_ids == []
        core.send(messages.StepOutput([messages.RequestDelta("r", [5, 6], cached_tokens=3)], group=1))
        core.send(messages.GroupsLost([1], "DP1 TP1 was killed by SIGKILL"))
        again = await core.got(0)
        assert (again.rid, again.prompt_ids, again.generated_ids, again.num_migrations) == (
            "r",
            [0, 1, 2, 3],
            [5, 6],
            1,
        )
        core.send(messages.StepOutput([messages.RequestDelta("r", [7])], group=1))  # arrives too late
        core.send(messages.StepOutput([messages.RequestDelta("r", [7], None, cached_tokens=6)], group=0))
        core.send(messages.GroupsLost([0], "DP0 TP0 was killed by SIGKILL"))
        last = await core.got(2)
        assert last.generated_ids == [5, 6, 7] and last.num_migrations == 2 and last.routed_dp_rank == 2
        core.send(messages.StepOutput([messages.RequestDelta("r", [8], {"type": "length", "length": 4})], group=2))
        assert await task == [5, 6, 7, 8]
        assert [health.alive for health in client.healths()] == [False, False, True] and client.health().alive
        with pytest.raises(EngineDeadError, match="DP1 TP1 was killed"):
            await ask(client, "there", 3, lane=1)
        assert all(load.num_requests == load.num_tokens == 0 for load in client._router.loads)


async def test_aborted_request_of_a_lost_group_does_not_migrate(tmp_path: Path) -> None:
    async with client_of(tmp_path, 2) as (client, (core,)):
        news: list[messages.RequestDelta] = []

        async def read() -> None:
            async for delta in client.stream(request("r", lane=1)):
                news.append(delta)

        task = asyncio.create_task(read())
        await core.got(1)
        client.abort(["r"], reason="enough")  # the group dies before it receives the abort
        info = asyncio.create_task(client.call("internal_state"))
        call = await core.got(0)
        assert isinstance(call, messages.Call)
        core.send(messages.StepOutput([messages.RequestDelta("r", [5, 6], cached_tokens=3)], group=1))
        core.send(messages.GroupsLost([1], "DP1 TP1 was killed by SIGKILL"))
        await task
        assert [token for delta in news for token in delta.token_ids] == [5, 6]
        last = news[-1]
        assert last.finish is not None and last.finish["type"] == "abort" and last.finish["message"] == "enough"
        core.send(messages.Reply(call.id, value={"of": 0}))
        assert await info == [{"of": 0}]  # from the surviving schedulers
        assert core.nothing_for(0)


async def test_poison_request_stops_after_max_migrations(tmp_path: Path) -> None:
    async with client_of(tmp_path, 6, method="round_robin") as (client, (core,)):
        task = ask(client, "poison")
        for group in range(4):
            assert (await core.got(group)).num_migrations == group
            core.send(messages.GroupsLost([group], f"DP{group} died"))
        with pytest.raises(EngineDeadError, match="DP3 died; this request has lost 4 schedulers"):
            await task
        assert core.nothing_for(4) and core.nothing_for(5)
