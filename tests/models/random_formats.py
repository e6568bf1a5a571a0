"""Random number formats on random shapes of families: ``python -m tests.models.random_formats --count 100``.

Integer and float formats with drawn groups, zeros, orders, and GGUF types by tensor; widths that no group divides among
them. Logits are those of an unquantized checkpoint with the values that the format defines, computed by transformers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moe_engine.errors import MoeEngineError
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from tests.models import random_shapes, random_sparse_shapes, stepper
from tests.models.checkpoints import GATED_STREAMS, KINDS, MORE_KINDS, dequantized_copy, make_checkpoint, write_tensors
from tests.models.format_checks import write_pair
from tests.models.gguf import write_gguf
from tests.models.quantized import quantize, section
from tests.models.quantized_floats import FLOATS, quantize_floats
from tests.models.random_shapes import LENGTH, Refused, run_draws
from tests.models.stepper import Chunk

GGUF = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
NO_FORMAT = ("gpt_oss", "qwen3_5", "qwen3_5_moe", "mistral4", "kimi_linear", "bailing_hybrid", "qwen3_next")
SPARSE = (GATED_STREAMS,)
SERVED = [*(kind for kind in (*KINDS, *MORE_KINDS) if kind not in NO_FORMAT), *SPARSE]
"""Families with quantized checkpoints."""
GROUPS = (0, 16, 32, 48, 64, 128)
LATENT = ("q_lora_rank", "kv_lora_rank", "v_head_dim")
TOLERANCE = 5e-4


@dataclass
class Shape:
    """A drawn checkpoint and its format: options of `quantize`, a name of `FLOATS`, ``fp8`` or ``gguf``."""

    kind: str
    row: str
    fields: dict[str, Any]
    format: str
    options: dict[str, Any] = field(default_factory=dict)


def draw(kind: str, rng: random.Random) -> Shape:
    fields = (random_sparse_shapes if kind in SPARSE else random_shapes).draw(kind, rng).fields
    if rng.random() < 0.6:
        _widen(fields, rng.choice((8, 16, 32, 64)))
    formats = ["pack-quantized", "int-quantized", "awq", "gptq", *rng.sample(sorted(FLOATS), 4), "fp8"]
    formats += ["gguf"] * 3 if kind in GGUF else []
    shape = Shape(kind, rng.choice(("torch", "cpu")), fields, rng.choice(formats))
    if shape.format == "fp8":
        shape.options = {"scale_dtype": rng.choice(("float32", "e8m0", "uint8"))}
    elif shape.format == "gguf":  # which has neither
        fields |= {name: False for name in ("attention_bias", "mlp_bias", "use_sliding_window") if name in fields}
        fields |= {"sliding_window": None} if "sliding_window" in fields else {}
        shape.options = {"types": rng.sample(sorted(BLOCK_TYPES), 3)}
    elif shape.format not in FLOATS:
        bits = 8 if shape.format == "int-quantized" else rng.choice((4, 8)) if shape.format != "awq" else 4
        group = 0 if shape.format == "int-quantized" else rng.choice(GROUPS)
        shape.options = {"layout": shape.format, "bits": bits, "group": group}
        shape.options["symmetric"] = shape.format != "awq" and rng.random() < 0.5
        shape.options["shuffled"] = shape.format in ("pack-quantized", "gptq") and group > 0 and rng.random() < 0.3
        if shape.format == "gptq":
            shape.options["v2"] = rng.random() < 0.3
    return shape


def _widen(fields: dict[str, Any], by: int) -> None:
    """Makes widths multiples of a number."""
    for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", *LATENT):
        if fields.get(name):
            fields[name] = -(-fields[name] // by) * by


def check(shape: Shape, folder: Path, seed: int) -> float:
    """The largest relative error of a token's logits. Raises Refused."""
    try:
        path, plain = _written(shape, folder, seed)
        if shape.kind in SPARSE:
            tokens, want = random_sparse_shapes.reference(plain, seed)
        else:
            tokens, want = random_shapes.reference(plain, seed, shape.fields["vocab_size"])
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    if path.is_dir():
        check_headers(path, read_checkpoint(path), load_model_config(path))
    pages = load_model_config(path).page_multiple if shape.kind in SPARSE else 1
    model = stepper.load(path, shape.row, page_size=pages, seed=seed)
    parts = tokens[:31], tokens[31:55], tokens[55:]
    got = torch.cat([model.step([Chunk(0, part, len(part) < 9)])[0] for part in parts])
    assert len(got) == LENGTH
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def _written(shape: Shape, folder: Path, seed: int) -> tuple[Path, Path]:
    """The quantized checkpoint, and a plain one with its values."""
    more: dict[str, Any] = {"tokenizer": False, **shape.fields}
    if shape.format == "fp8":
        path = make_checkpoint(shape.kind, folder / "q", seed, fp8=True, **shape.options, **more)
        return path, dequantized_copy(path, folder / "plain")
    if shape.format == "gguf":
        rng = random.Random(seed)
        plain = make_checkpoint(shape.kind, folder / "plain", seed, **shape.fields)

        def type_of(name: str) -> str:
            return str(rng.choice(shape.options["types"]))

        write_tensors(plain, write_gguf(plain, folder / "model.gguf", shape.kind, type_of, rng.random() < 0.3))
        return folder / "model.gguf", plain
    path = make_checkpoint(shape.kind, folder / "q", seed, **more)
    tensors = load_file(path / "model.safetensors")
    if shape.format in FLOATS:
        stored, values = quantize_floats(tensors, shape.format)
        return write_pair(path, stored, values, {"quantization_config": FLOATS[shape.format][1]})
    stored, values = quantize(tensors, seed=seed, **shape.options)
    dtype = "float16" if shape.format in ("awq", "gptq") else "bfloat16"
    return write_pair(path, stored, values, {"torch_dtype": dtype, "quantization_config": section(**shape.options)})


def _check_within_tolerance(shape: Shape, folder: Path, rng: random.Random, seed: int) -> str:
    try:
        found = check(shape, folder, seed)
    except MoeEngineError as error:
        return f"refused by name: {shape.kind}, {shape.format} {shape.options}: {str(error)[-200:]}"
    assert found < TOLERANCE, found
    return f"{shape.kind}, {shape.row}, {shape.format}, {shape.options}"


if __name__ == "__main__":
    run_draws(__doc__, SERVED, 50, draw, _check_within_tolerance)
