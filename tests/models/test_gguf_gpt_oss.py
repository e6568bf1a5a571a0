"""gpt-oss as a GGUF file: logits are those of the hub layout with the file's values, in transformers and here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.format_checks import ledger_fits, loaded, step_logits
from tests.models.gguf_gpt_oss import write_gpt_oss


def published(name: str) -> str:
    """The types of the files that people download: experts in MXFP4, the rest in Q8_0."""
    return "MXFP4" if "_exps" in name else "Q8_0"


@pytest.fixture
def both(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    plain = make_checkpoint(
        "gpt_oss", tmp_path / "plain", torch.initial_seed() % 1000, swiglu_limit=7.0, head_dim=32, intermediate_size=64,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    path = tmp_path / "model.gguf"
    write_tensors(plain, write_gpt_oss(plain, path, getattr(request, "param", published)))
    return path, plain


@pytest.mark.parametrize("both", [published, lambda name: "BF16", lambda name: "Q4_0"], indirect=True)
def test_logits_are_those_of_transformers(both: tuple[Path, Path]) -> None:
    path, plain = both
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.tensor([[3, 141, 59, 26, 5, 9, 7, 11]])
    with torch.inference_mode():
        want = theirs(ids).logits[0]
    scale = float(want.abs().max())
    torch.testing.assert_close(step_logits(loaded(path)), want, rtol=1e-4, atol=1e-4 * scale)
    torch.testing.assert_close(step_logits(loaded(path, "cpu")), want, rtol=1e-3, atol=1e-3 * scale)


def test_the_kernels_multiply_experts_as_stored(both: tuple[Path, Path]) -> None:
    assert ledger_fits(loaded(both[0], "cpu")) < 0.5


def test_biases_without_their_other_half_are_refused(both: tuple[Path, Path]) -> None:
    path, _ = both
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up_exps.bias", b"blk.1.ffn_xx_exps.bias"))
    with pytest.raises(CheckpointError, match=r"ffn_gate_exps\.bias comes without a matching ffn_up_exps\.bias"):
        load_model_config(path)
