"""--explain shows every value with its origin, the ledger, and every kernel row with its reason."""

from __future__ import annotations

import json

from moe_engine.config.args import PARTS
from moe_engine.config.field import fields_of
from moe_engine.kernels import tables
from moe_engine.planning.output.explain import explain_json, explain_text, start_lines
from tests.config.conftest import machine


def test_text(resolved):
    bare = machine(compiler=None)
    config = resolved(on=bare, page_size=16, api_key="hidden-key", max_total_tokens=1000)
    text = explain_text(config)
    for part in PARTS.values():
        for info in fields_of(part):
            assert f"  {info.name} " in text
    assert "hidden-key" not in text and "***" in text
    line = next(line for line in text.splitlines() if line.startswith("  page_size "))
    assert line.split() == ["page_size", "16", "given"]
    line = next(line for line in text.splitlines() if line.startswith("  max_total_tokens "))
    assert line.split() == ["max_total_tokens", "992", "given"]
    assert "auto: the default on a CPU" in text and "KV cache" in text and "max_req_input_len" in text
    assert "needs a C++ compiler" in text


def test_json(resolved):
    config = resolved()
    found = json.loads(json.dumps(explain_json(config)))
    assert found["values"]["page_size"] == {
        "value": 1,
        "origin": "auto",
        "reason": found["values"]["page_size"]["reason"],
    }
    assert found["values"]["port"]["origin"] == "default"
    rows = found["memory"]["rows"]
    assert sum(row["num_bytes"] for row in rows) == found["memory"]["total_bytes"]
    kernels = {kernel["family"]: kernel for kernel in found["kernels"]}
    assert set(kernels) == {"ops", "linear", "experts", "attention", "sampling"}
    for family, rows in (("ops", tables.OPS), ("attention", tables.MLA)):
        assert {kernels[family]["backend"], *kernels[family]["refused"]} == {row.name for row in rows}


def test_start_lines(resolved):
    lines = start_lines(resolved(max_total_tokens=1000))
    assert any("weights" in line for line in lines) and lines[-1].startswith("Note: ")


def test_the_dispatcher_is_explained(resolved):
    config = resolved(tp=2, moe_a2a_backend="all_to_all")
    text = explain_text(config)
    assert "dispatch    all_to_all  named by its flag" in text
    assert "not symm_mem: symmetric memory is for GPUs; the device is cpu" in text
    assert "not nvshmem: NVSHMEM is for GPUs; the device is cpu" in text
    kernel = explain_json(config)["kernels"][-1]
    assert kernel["family"] == "dispatch" and "symm_mem" in kernel["refused"]
    assert "dispatch " not in explain_text(resolved(tp=2)).split("kernels:")[1]
