"""Memory of each rank, compared with the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_engine import Engine
from moe_engine.planning.memory.ledger import WEIGHT_ROWS
from tests.models.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("deepseek_v3", {"speculative_algorithm": "NEXTN"}),
    "dp2 ep2": ("deepseek_v3", {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "moe_a2a_backend": "allgather"}),
    "redundant experts": ("deepseek_v3", {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 2}),
    "whole shared experts": ("hy_v3", {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "allgather"}),
    "a whole MLP beside experts": ("gemma4", {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "allgather"}),
    "zero experts in the files": ("longcat_flash", {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_ledger_is_what_ranks_hold(form: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 4000, "hidden_size": 256, "max_position_embeddings": 4096}
    kind, flags = FORMS[form]
    sizes |= {"num_shared_experts": 2, "moe_intermediate_size": 96} if kind == "hy_v3" else {}
    path = make_checkpoint(kind, tmp_path, num_mtp_layers=int(form == "one rank"), **sizes)
    with Engine(str(path), **flags, dtype="float32", max_total_tokens=3000, skip_tokenizer_init=True) as engine:
        ledger, ranks, info = engine.config.ledger, engine.get_memory_usage(), engine.info
    assert len(ranks) == flags.get("tp_size", 1)
    assert info.weight_bytes == pytest.approx(sum(map(ledger.bytes_of, WEIGHT_ROWS)), rel=0.02)
    for rank in ranks:
        assert rank["weights"] == pytest.approx(sum(map(ledger.bytes_of, WEIGHT_ROWS)), rel=0.02)
        assert rank["kv_cache"] == pytest.approx(ledger.kv_bytes, rel=0.02)
        assert rank["process"] > rank["weights"] and rank["device"] == 0
