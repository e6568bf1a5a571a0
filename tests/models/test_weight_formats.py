"""A weight format needs its own class and a line in the table: int8 weights with a scale per row, defined here only."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.kernels.experts.batch import ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsCapabilities, QuantizedExperts
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.kernels.linear.protocol import LinearCapabilities, PreparedLinear
from moe_engine.kernels.linear.reference import TorchLinear
from moe_engine.kernels.quantization.protocol import Normal
from moe_engine.kernels.weight_forms import Multiplied, WeightForm, families
from moe_engine.models import sizes
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors, WeightFormat
from moe_engine.models.formats.table import FORMATS, Method, format_in_files
from moe_engine.models.header_check import check_headers
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.weights import WeightReader
from moe_engine.planning.inputs.checkpoint import sums
from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.format_checks import multiplied, step_logits
from tests.models.fp8 import is_quantized
from tests.models.stepper import Stepper, make_backends

INT8_ROWS = WeightForm("int8_rows")


@dataclass(frozen=True)
class Int8Weight:
    """W[n, k] = data[n, k] * scales[n]."""

    data: Tensor
    scales: Tensor

    def rows(self, start: int, stop: int) -> Int8Weight:
        return Int8Weight(self.data[start:stop], self.scales[start:stop])

    def dequantized(self) -> Tensor:
        return self.data * self.scales[:, None]

    def randomize(self, deviation: float, normal: Normal) -> None:
        values = torch.empty(self.data.shape)
        normal(values, 32.0)
        self.data.copy_(values.clamp(-127, 127))
        self.scales.fill_(deviation / 32)


@dataclass(frozen=True)
class Int8Rows:
    """`KernelFormat` of `Int8Weight`."""

    form = INT8_ROWS
    row_block = 1

    def empty(self, n: int, k: int, device: torch.device | str) -> Int8Weight:
        return Int8Weight(torch.empty(n, k, dtype=torch.int8, device=device), torch.empty(n, device=device))


@dataclass(frozen=True)
class Int8Format:
    """`WeightFormat`: `prefix.values` and `prefix.row_scale`, no tensor `prefix.weight`."""

    name = "int8"

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        if f"{prefix}.weight" in names:  # eh_proj and lm_head
            return PLAIN.tensors(prefix, shape, names)
        return StoredTensor(f"{prefix}.values", shape, ("I8",)), StoredTensor(
            f"{prefix}.row_scale", shape[:1], ("F32",)
        )

    def is_scale(self, name: str) -> bool:
        return name.endswith(".row_scale")

    def bytes_per_element(self, prefix: str, shape: Shape, dtype_bytes: int) -> Fraction:
        return 1 + Fraction(4, shape[1])

    def held_by(self, multiplied: Multiplied) -> WeightFormat:
        return self if families(multiplied, INT8_ROWS) else PLAIN

    def kernel_format(self, prefix: str) -> Int8Rows:
        return Int8Rows()

    has_kernel_formats = True

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        return f"{prefix}.values" in source.names

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | Any) -> None:
        values, *scales = self.tensors(prefix, shape, source.names)
        if not scales:
            PLAIN.load(source, prefix, shape, cut, out)
            return
        with source.open(values, cut) as part, source.open(scales[0], Cut(cut.rows)) as scale:
            if isinstance(out, Int8Weight):
                out.data.copy_(part)
                out.scales.copy_(scale)
            else:
                out.copy_(part * scale[:, None])


class Int8Linear(TorchLinear):
    """A row that declares the format; it stores int8 and dequantizes for each product."""

    @property
    def capabilities(self) -> LinearCapabilities:
        return LinearCapabilities({Int8Rows: self.prepare_rows})

    def prepare_rows(self, weight: Int8Weight, bias: Tensor | None) -> PreparedLinear:
        n, k = weight.data.shape
        return PreparedLinear(k, n, weight, bias, n * k + 4 * n)

    def run(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        if isinstance(weight.data, Int8Weight):
            weight = replace(weight, data=weight.data.dequantized())
        return super().run(x, weight)


class Int8Experts(TorchExperts):
    """A row that declares the format; it dequantizes an expert when it is stored."""

    @property
    def capabilities(self) -> ExpertsCapabilities:  # type: ignore[override]
        return ExpertsCapabilities({Int8Rows: QuantizedExperts(self.allocate_rows, self.load_rows)})

    def allocate_rows(self, num_experts: int, hidden: int, width: int, device: Any, format: Int8Rows) -> ExpertWeights:
        self.format = format
        return self.allocate(num_experts, hidden, width, torch.float32, device)

    def load_rows(self, weights: ExpertWeights, expert: int, *parts: Int8Weight) -> None:
        gate, up, down = (part.dequantized() for part in parts)
        self.load_expert(weights, expert, gate, up, down)


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkpoint in int8, and the same weights dequantized."""
    monkeypatch.setitem(FORMATS, "int8", Method("int8", lambda section: Int8Format()))
    path = make_checkpoint("deepseek_v3", tmp_path / "int8", seed=4, tokenizer=False)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not is_quantized(name):
            stored[name] = plain[name] = tensor
            continue
        scales = tensor.abs().amax(1).clamp_min(1e-12) / 127
        values = (tensor / scales[:, None]).round().to(torch.int8)
        prefix = name.removesuffix(".weight")
        stored |= {f"{prefix}.values": values, f"{prefix}.row_scale": scales}
        plain[name] = values * scales[:, None]
    fields = json.loads((path / "config.json").read_text())
    write_tensors(path, stored)
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "int8"}}))
    other = tmp_path / "plain"
    other.mkdir()
    write_tensors(other, plain)
    (other / "config.json").write_text(json.dumps(fields))
    return path, other


def loaded(path: Path, kept: bool = False, **options: Any) -> Stepper:
    config = load_model_config(path)
    backends = make_backends(config)
    if kept:
        backends = replace(backends, linear=Int8Linear(), experts=Int8Experts())
    return Stepper(load_model(path, config, LoadOptions("float32", **options), backends), config, backends)


@pytest.mark.parametrize("kept", [False, True])
def test_a_third_format_gives_the_tokens_of_its_dequantized_weights(checkpoints: tuple[Path, Path], kept: bool) -> None:
    path, plain = checkpoints
    model = loaded(path, kept)
    assert torch.equal(step_logits(model), step_logits(loaded(plain)))
    layer: Any = model.model.layers[0]  # type: ignore[attr-defined]
    assert isinstance(layer.attention._o.weight.data, Int8Weight) is kept


def test_random_weights_of_a_third_format(checkpoints: tuple[Path, Path]) -> None:
    logits = step_logits(loaded(checkpoints[0], kept=True, load_format="dummy"))
    assert logits.isfinite().all() and 0.1 < logits.std() < 10


def test_the_header_check_asks_the_format(checkpoints: tuple[Path, Path]) -> None:
    path, _ = checkpoints
    config, files = load_model_config(path), read_checkpoint(path)
    check_headers(path, files, config)
    name = "model.layers.2.mlp.experts.7.up_proj.row_scale"
    with pytest.raises(CheckpointError, match=rf"1 tensors .*{name} \[32\] is missing"):
        check_headers(path, {key: file for key, file in files.items() if key != name}, config)
    with pytest.raises(CheckpointError, match=r"o_proj.values has shape \[64, 48\], config.json implies \[64, 50\]"):
        WeightReader(path, torch.float32, format=config.weight_format).linear(
            "model.layers.0.self_attn.o_proj", (64, 50)
        )


def test_the_ledger_asks_the_format(checkpoints: tuple[Path, Path]) -> None:
    path, plain = checkpoints
    config = load_model_config(path)
    kept_by, others = {"linear": frozenset((INT8_ROWS,))}, multiplied("cpu")
    stored, dequantized = (
        sizes.weight_bytes(config, 2, format=config.weight_format.held_by(rows)) for rows in (kept_by, others)
    )
    assert dequantized == sizes.weight_bytes(load_model_config(plain), 2)
    kept = [
        tensor.shape for name, tensor in load_file(path / "model.safetensors").items()
        if name.endswith(".values") and "kv_b_proj" not in name
    ]  # fmt: skip
    assert dequantized - stored == sum(n * k - 4 * n for n, k in kept)
    facts = sums(read_checkpoint(path), config.num_layers, config.weight_format)
    assert facts.num_elements == sizes.num_parameters(config)


def test_other_methods_are_refused_with_the_supported_ones(checkpoints: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"'hqq' is not supported; use a checkpoint in bf16, block-FP8, .* or int8$"):
        load_model_config(checkpoints[0], {"quantization_config": {"quant_method": "hqq"}})


def test_choice_of_a_format() -> None:
    """Block FP8 is also recognized by its scales; blocks of other sizes are dequantized everywhere."""
    names = ["a.weight", "a.weight_scale_inv"]
    assert format_in_files(PLAIN, names) == BlockFP8Format() and format_in_files(PLAIN, names[:1]) == PLAIN
    declared = BlockFP8Format((128, 64), "ue8m0")
    assert format_in_files(declared, names) == declared == pickle.loads(pickle.dumps(declared))
    on_gpu, on_cpu = multiplied("triton"), multiplied("cpu")
    assert declared.held_by(on_gpu) == PLAIN and declared.kernel_format("a") is None
    assert BlockFP8Format().held_by(on_gpu) == BlockFP8Format() and BlockFP8Format().held_by(on_cpu) == PLAIN
