"""Requests that schemathesis generates from /openapi.json, valid and invalid: no 5xx, responses as described.

The test runs a few per endpoint. The long run, of about 20,000 requests:

    SCHEMATHESIS_EXAMPLES=250 PYTHONPATH=DIR:. pytest tests/clients/test_schemathesis.py

where DIR is the target of ``pip install --target DIR schemathesis``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess

pytestmark = [
    pytest.mark.usefixtures("forked_processes"),
    pytest.mark.skipif(find_spec("schemathesis") is None, reason="needs schemathesis: pip install schemathesis"),
]
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "4"))
LEFT_OUT = "pause_generation|start_profile|dump_expert|init_weights_update_group"
"""A pause blocks all further answers; a trainer's group waits for the trainer; the others write files."""
CHECKS = (
    "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance,"
    "unsupported_method,allow_header_conformance"
)
SMALL = ("--context-length", "128", "--chunked-prefill-size", "32", "--max-total-tokens", "4096", "--cpu-threads", "1")


@pytest.mark.timeout(3600 if EXAMPLES < 20 else 6 * 3600)
@pytest.mark.parametrize("kind", ["text", "vectors"])
def test_no_fault_and_answers_as_described(tmp_path: Path, kind: str) -> None:
    phases = "fuzzing" if EXAMPLES < 20 else "coverage,fuzzing"
    if kind == "vectors":
        flags, chosen = ("--is-embedding",), ["--include-path-regex", "embeddings|encode|rerank|classify|score"]
    else:
        flags, chosen = (), ["--exclude-path-regex", LEFT_OUT]
    with ServerProcess(tmp_path, *SMALL, "--enable-metrics", *flags) as server:
        done = subprocess.run(
            [
                sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", CHECKS,
                "--phases", phases, "--max-examples", str(EXAMPLES), "--no-shrink", "--no-color",
                "--generation-database", "none", "--suppress-health-check", "all", "--continue-on-failure",
                "--request-timeout", "60", *chosen,
            ],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert server.process.poll() is None, server.log[-3000:]
    assert done.returncode == 0, done.stdout[-6000:]
    generated = re.search(r"([\d,]+) generated", done.stdout)
    assert generated and int(generated[1].replace(",", "")) >= EXAMPLES, done.stdout[-2000:]
    print(f"{kind}: {generated[1]} requests")
