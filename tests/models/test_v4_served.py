"""DeepSeek V4 in an engine: checkpoints in the published forms, new weights by name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine import Engine
from tests.models.family_parity import NUM_TOKENS, compare, serve
from tests.models.parity_families import Family, Prompt
from tests.models.v4_checkpoints import load_v4, make_v4
from tests.models.v4_quantized import quantized_copy

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(2)]

TABLE = "layers.1.ffn.gate.tid2eid"
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


def prompts(count: int) -> list[list[int]]:
    return [[random.randrange(5, 250) for _ in range(random.randrange(5, 90))] for _ in range(count)]


@pytest.mark.parametrize(
    ("expert_dtype", "form"), [("fp4", "together"), ("fp4", "tp 2"), ("fp8", "dp 2"), ("fp4", "MTP drafts")]
)
def test_published_forms(tmp_path: Path, expert_dtype: str, form: str) -> None:
    """Block FP8 with experts in MXFP4 or FP8: transformers' tokens with the values by definition."""
    widths = {"hidden_size": 160, "moe_intermediate_size": 192}
    source = make_v4(tmp_path / "plain", random.randrange(1 << 30), num_mtp_layers=1, **widths)
    stored, values = quantized_copy(source, tmp_path, expert_dtype)
    model = load_v4(values)

    @torch.inference_mode()
    def logits(ids: list[int], images: object) -> Tensor:
        found: Tensor = model(torch.tensor([ids])).logits[0]
        return found

    asked = [Prompt(ids, ids) for ids in prompts(6)]
    family = Family(stored, logits, lambda *_: asked, model.get_input_embeddings().weight)
    result = compare(family, asked, serve(stored, asked, NUM_TOKENS, form))
    assert result.tokens and not result.wrong and result.error < 1e-3, result


def test_new_weights_by_name(tmp_path: Path) -> None:
    """All tensors of another checkpoint, then the table of experts by token id alone."""
    old, new = (make_v4(tmp_path / name, seed, tokenizer=False) for seed, name in enumerate(("old", "new")))
    prompt = prompts(1)[0]

    def answer(engine: Engine) -> list[int]:
        found: list[int] = engine.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]
        return found

    flags = {"dtype": "float32", "max_total_tokens": 1024, "skip_tokenizer_init": True}
    served = Engine(model_path=str(new), **flags)
    want = answer(served)
    served.shutdown()
    engine = Engine(model_path=str(old), **flags)
    try:
        tensors = load_file(new / "model.safetensors")
        table = tensors.pop(TABLE)
        assert engine.update_weights_from_tensor(list(tensors.items()))[0]
        assert engine.update_weights_from_tensor([(TABLE, table)])[0]
        assert answer(engine) == want
        read = engine.get_weights_by_name("model.layers.1.mlp.gate.tid2eid", truncate_size=len(table))
        assert torch.equal(torch.tensor(read), table.float())
    finally:
        engine.shutdown()
