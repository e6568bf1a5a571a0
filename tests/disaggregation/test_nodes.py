"""Servers over two nodes on this machine: the tokens of one server, with KV transferred from ranks of both nodes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from moe_engine.processes.addresses import free_port
from tests.disaggregation.pair import FLAGS, Pair
from tests.disaggregation.test_ranks import bodies
from tests.e2e.server_process import ServerProcess
from tests.models.checkpoints import make_checkpoint

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.exhaustive]


def two_nodes() -> tuple[str, ...]:
    return "--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"


class TwoNodes(Pair):
    """A prefill and a decode server; one of them, or both, over two nodes."""

    def __init__(self, folder: Path, sides: str, *flags: str) -> None:
        nodes = {side: two_nodes() if side in sides else () for side in ("prefill", "decode")}
        super().__init__(folder, *flags, **nodes)
        mode = ("--disaggregation-bootstrap-port", str(self.port), "--disaggregation-mode")
        for side, own in nodes.items():
            if own:
                second = ServerProcess(folder, *FLAGS, *flags, *own, "--node-rank", "1", *mode, side)
                self._stack.callback(second.__exit__)


@pytest.mark.parametrize("sides", ["prefill", "decode", "prefill and decode"])
@pytest.mark.parametrize("model", ["mla", "gqa"])
def test_tokens_are_those_of_one_server(sides: str, model: str, tmp_path: Path) -> None:
    flags: tuple[str, ...] = ()
    if model == "gqa":
        path = make_checkpoint("qwen3", tmp_path / "model", seed=3, num_key_value_heads=4, vocab_size=1024)
        flags = ("--model-path", str(path))
    asked = bodies(2)
    with ExitStack() as stack:
        one = stack.enter_context(ServerProcess(tmp_path, *FLAGS, *flags))
        expected = [httpx.post(one.url + "/generate", json=body, timeout=180).json() for body in asked]
    with TwoNodes(tmp_path, sides, *flags) as pair:
        for body, single in zip(asked, expected):
            got = pair.post("/generate", body).json()
            assert got["output_ids"] == single["output_ids"], pair.decode.log
            assert got["meta_info"]["cached_tokens"] >= 297, pair.decode.log + pair.prefill.log
        for server in (pair.prefill, pair.decode):
            server.wait_free()
