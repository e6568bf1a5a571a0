"""An MTP layer in its own checkpoint (SGLang's NextN checkpoints) gives the drafts of the layer in the model's
checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.planning.prepare import prepare
from tests.engine.harness import InProcessEngine, Scripted
from tests.models.checkpoints import make_checkpoint

MTP = "model.layers.3."
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
NEXTN = {"speculative_algorithm": "NEXTN", "dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 8}


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "fp8"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("whole"), num_mtp_layers=1, fp8=request.param)


def exported(whole: Path, to: Path) -> tuple[Path, Path]:
    """The model without its MTP layer, and the layer alone, as SGLang's script writes them."""
    tensors, config = load_file(whole / "model.safetensors"), json.loads((whole / "config.json").read_text())
    model, layer = to / "model", to / "nextn"
    for folder in (model, layer):
        folder.mkdir()
    save_file({n: t for n, t in tensors.items() if not n.startswith(MTP)}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    own = {n.replace(MTP, "model.layers.0."): t for n, t in tensors.items() if n.startswith(MTP)}
    kept = {name: tensor for name, tensor in own.items() if not name.endswith(COPIES)}
    save_file(kept, layer / "nextn_layer_parameters.safetensors")
    change = {"architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    (layer / "config.json").write_text(json.dumps(config | change))
    return model, layer


def answers(path: Path, status: Path, **flags: object) -> dict[str, object]:
    rng = random.Random(5)
    script = [
        Scripted(f"r{i}", [rng.randrange(250) for _ in range(9 * i + 3)], 24, arrives=i, logprob=True) for i in range(4)
    ]
    engine = InProcessEngine(path, status, **{**NEXTN, **flags})
    try:
        found = engine.run(script)
        tokens = {rid: (answer.token_ids, answer.logprobs) for rid, answer in found.items()}
        return {"tokens": tokens, "speculation": engine.scheduler.stats().speculation}
    finally:
        engine.close()


def test_drafts_equal_those_of_the_checkpoints_own_layer(checkpoint: Path, tmp_path: Path) -> None:
    model, layer = exported(checkpoint, tmp_path)
    own = answers(checkpoint, tmp_path / "a")
    assert answers(model, tmp_path / "b", speculative_draft_model_path=str(layer)) == own
    assert answers(checkpoint, tmp_path / "c", speculative_draft_model_path=str(layer)) == own


def test_layers_of_other_models_and_broken_ones_are_refused(tmp_path: Path) -> None:
    model, layer = exported(make_checkpoint("deepseek_v3", tmp_path / "whole", num_mtp_layers=1), tmp_path)
    flags = {"model_path": str(model), "device": "cpu", "speculative_draft_model_path": str(layer)}

    def start(algorithm: str = "NEXTN") -> None:
        prepare(EngineArgs.from_kwargs(**flags, speculative_algorithm=algorithm))

    start()
    with pytest.raises(ConfigError, match="exported on its own; use --speculative-algorithm NEXTN"):
        start("STANDALONE")
    file = layer / "nextn_layer_parameters.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.extra.weight": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.extra\.weight belongs to no MTP layer"):
        start()
    tensors.pop("model.layers.0.eh_proj.weight")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight.* is missing"):
        start()
    config = json.loads((layer / "config.json").read_text())
    (layer / "config.json").write_text(json.dumps(config | {"vocab_size": 99}))
    with pytest.raises(ConfigError, match=r"of another model: its vocab_size is 99, and that of .* is 320"):
        start()
