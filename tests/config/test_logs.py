"""SGLang's log format and startup lines, exactly."""

from __future__ import annotations

import io
import logging
import logging.config
import re

from moe_engine import logs


def test_prefix():
    stream = io.StringIO()
    logger = logs.setup_logging("info", stream=stream)
    logger.info("message 100%")
    logging.getLogger("moe_engine.worker.worker").info("child")
    logger.debug("hidden")
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] message 100%\n\[[^\]]*\] child\n", stream.getvalue())


def test_rank_tag():
    for tag in (" DP0 TP1", "DP0 TP1"):
        stream = io.StringIO()
        logs.setup_logging("warning", tag, stream).warning("x")
        assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d DP0 TP1\] x\n", stream.getvalue())
    logs.setup_logging()


def test_start_lines():
    assert logs.startup_line(523, 2048, 16384, 256, 4096, 12.345) == (
        "max_total_num_tokens=523, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=256, "
        "context_len=4096, available_gpu_mem=12.35 GB"
    )
    assert logs.load_begin_line(20) == "Load weight begin. avail mem=20.00 GB"
    assert logs.load_end_line(1.5, "DeepseekV3ForCausalLM", "bfloat16", 5.0, 15.0) == (
        "Load weight end. elapsed=1.50 s, type=DeepseekV3ForCausalLM, dtype=torch.bfloat16, avail mem=5.00 GB, "
        "mem usage=15.00 GB."
    )
    assert logs.kv_line("bfloat16", 100, 2.0) == (
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 100, KV size: 2.00 GB"
    )
    assert logs.kv_line("torch.float32", 100, 2.0, is_mla=False).endswith("K size: 1.00 GB, V size: 1.00 GB")
    assert logs.pool_end_line(3) == "Memory pool end. avail mem=3.00 GB"
    assert logs.READY_LINE == "The server is fired up and ready to roll!"


def test_uvicorn_lines():
    config = logs.uvicorn_config("info", "warning")
    logging.config.dictConfig(config)
    assert logging.getLogger("uvicorn.access").level == logging.WARNING
