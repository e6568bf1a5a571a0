"""Random checkpoints of all families in all quantized formats, and GGUF files of drawn block types: whole and sharded,
their logits are those of a plain checkpoint with the values that the format defines."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.sharding import local_config
from moe_engine.parallel.context import SINGLE
from moe_engine.parallel.topology import Topology
from tests.distributed.models.test_shards import imagine
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import write_pair
from tests.models.fp8 import is_quantized
from tests.models.quantized import quantize, section
from tests.models.quantized_floats import FLOATS, quantize_floats
from tests.models.stepper import Chunk, Stepper, make_backends
from tests.models.test_gguf import FAMILIES, WIDE, write_both
from tests.models.test_integer_formats import LAYOUTS

KINDS = (
    "deepseek_v3", "deepseek_v2_lite", "deepseek_v32", "glm_moe_dsa", "qwen3_moe", "glm4_moe", "minimax_m2", "mixtral",
    "qwen3_next", "llama", "qwen2", "qwen3",
)  # fmt: skip
MLA = ("deepseek_v3", "deepseek_v2_lite", "deepseek_v32", "glm_moe_dsa")
WHOLE = (None, 0)
SHARDS: tuple[tuple[Topology, int], ...] = (
    (Topology(2), 0),
    (Topology(2), 1),
    (Topology(2, ep_size=2), 1),
    (Topology(4), 2),
    (Topology(4, ep_size=2), 3),
)


def write(folder: Path, kind: str, format: str) -> tuple[Path, Path]:
    """A quantized checkpoint, and a plain one with its values. Widths are multiples of 8, which packed formats need."""
    widths: dict[str, Any] = {}
    if kind in MLA:
        widths = {"kv_lora_rank": 32, "v_head_dim": 16} | ({} if "lite" in kind else {"q_lora_rank": 32})
    if kind in ("deepseek_v3", "glm4_moe"):
        widths["num_mtp_layers"] = random.randrange(2)
    if kind == "mixtral":
        widths["intermediate_size"] = 128  # ranks cut it at groups, and the plain checkpoint at the same places
    path = make_checkpoint(kind, folder / "quantized", seed=random.randrange(1000), tokenizer=False, **widths)
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "weights_proj" in name}  # of indexers
    if format not in LAYOUTS:
        rest = {name: tensor for name, tensor in tensors.items() if name not in kept}
        stored, plain = quantize_floats(rest, format)
        return write_pair(path, stored | kept, plain | kept, {"quantization_config": FLOATS[format][1]})
    options = LAYOUTS[format]
    chosen = lambda name: name not in kept and is_quantized(name)  # noqa: E731
    stored, plain = quantize(tensors, seed=random.randrange(1000), chosen=chosen, **options)
    dtype = "float16" if options["layout"] in ("awq", "gptq") else "bfloat16"
    return write_pair(path, stored, plain, {"torch_dtype": dtype, "quantization_config": section(**options)})


def logits(path: Path, topology: Topology | None, rank: int, row: str) -> Tensor:
    """Of a prompt of 40 tokens, and of three tokens after it; sums over ranks are this rank's part."""
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)
    parallel = SINGLE if topology is None else imagine(topology, rank, [])
    backends = make_backends(config, row)
    model = load_model(path, config, LoadOptions("float32"), backends, parallel)
    stepper, vocab = Stepper(model, local_config(config, parallel), backends), config.vocab_size
    found = stepper.step([Chunk(0, [(i * 37 + 11) % vocab for i in range(40)], False)])
    for token in (9, vocab // 2 + 3, vocab - 2):
        found += stepper.step([Chunk(0, [token], True)])
    return torch.cat(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(24))
def test_logits_are_those_of_the_values(tmp_path: Path, number: int) -> None:
    kind, format = random.choice(KINDS), random.choice([*LAYOUTS, *FLOATS])
    stored, plain = write(tmp_path, kind, format)
    for topology, rank in (WHOLE, *random.sample(SHARDS, 2)):
        # The C++ row rounds the scales of NVFP4 to bfloat16, which may change choices of routers and indexers.
        for row in ("torch",) if "nvfp4" in format else ("torch", "cpu"):
            check_near(stored, plain, topology, rank, row, f"{kind} {format}")


def check_near(stored: Path, plain: Path, topology: Topology | None, rank: int, row: str, case: str) -> None:
    try:
        want = logits(plain, topology, rank, row)
    except ConfigError:
        return  # this family cannot be sharded so
    error = float((logits(stored, topology, rank, row) - want).norm() / want.norm())
    assert error < 3e-4, (case, topology, rank, row, error)


@pytest.mark.parametrize("number", [0, 1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, 24))])
def test_logits_of_gguf_files(tmp_path: Path, number: int) -> None:
    """A type for all matrices, with another for some of them."""
    kind, main = random.choice(FAMILIES), random.choice([*BLOCK_TYPES])
    others = random.choices([main, *BLOCK_TYPES, "F16"], k=3)
    share = random.choice([0.0, 0.3])
    types: dict[str, str] = {}

    def type_of(name: str) -> str:
        return types.setdefault(name, random.choice(others) if random.random() < share else main)

    widths: dict[str, Any] = WIDE if random.random() < 0.8 else {"hidden_size": 128, "intermediate_size": 128}
    if kind == "qwen3_moe" or kind in MLA:
        widths = widths | {"moe_intermediate_size": random.choice([128, 256, 512])}
    stored, plain = write_both(tmp_path, kind, type_of, split=random.random() < 0.5, **widths)
    for topology, rank in (WHOLE, *random.sample(SHARDS, 2)):
        for row in ("torch", "cpu"):
            check_near(stored, plain, topology, rank, row, f"{kind} {main} {types}")
