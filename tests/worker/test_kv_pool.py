"""Shapes, bytes, zeros, and memory that is committed only when used."""

from __future__ import annotations

import dataclasses
import resource
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.kv_format.formats import head_width, latent_width
from moe_engine.models.config import GQAConfig, MLAConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec, kv_spec
from tests.models.checkpoints import SPARSE_KINDS, make_checkpoint
from tests.models.stepper import Chunk, Stepper, make_backends

STREAM = DeviceStream("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shapes_and_bytes(dtype: torch.dtype) -> None:
    mla = KVPool(KVSpec.mla(3, 32, 8, dtype), 64, 16, STREAM)
    assert [tuple(t.shape) for t in mla.layers] == [(80, 40)] * 3
    assert mla.spec.bytes_per_token == 3 * 40 * dtype.itemsize
    gqa = KVPool(KVSpec.gqa(2, 4, 24, dtype), 64, 1, STREAM)
    assert [[tuple(t.shape) for t in layer] for layer in gqa.layers] == [[(65, 4, 24)] * 2] * 2
    assert gqa.spec.bytes_per_token == 2 * 2 * 4 * 24 * dtype.itemsize
    held = [t for layer in gqa.layers for t in layer] + list(mla.layers)
    assert all(t.dtype == dtype and t.is_contiguous() and not t.any() for t in held)
    assert sum(t.nbytes for t in held) == mla.num_bytes + gqa.num_bytes


def test_deepseek_v3_is_576_numbers_a_token_and_layer() -> None:
    assert KVSpec.mla(61, 512, 64, torch.bfloat16).bytes_per_token == 576 * 61 * 2


def test_fp8_rows_are_about_half_as_long() -> None:
    assert KVSpec((((latent_width("fp8_e4m3", 512, 64),),),) * 61, torch.uint8).bytes_per_token == 656 * 61
    assert latent_width("fp8_e5m2", 512, 64) == 576 and latent_width("fp8_e4m3", 64, 16) == 96
    assert head_width("fp8_e4m3", 128) == 132 and head_width("fp8_e5m2", 128) == 128
    mla = MLAConfig(4, None, kv_lora_rank=64, qk_nope_head_dim=8, qk_rope_head_dim=16, v_head_dim=8)
    gqa = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=24)
    assert mla.kv_parts("bfloat16") == ((80,),) and mla.kv_parts("fp8_e4m3") == ((96,),)
    assert gqa.kv_parts("float32") == ((2, 24),) * 2 and gqa.kv_parts("fp8_e4m3") == ((2, 28),) * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e5m2])
def test_rows_move_as_if_all_were_read_first(dtype: torch.dtype) -> None:
    pool = KVPool(KVSpec.gqa(2, 2, 6, dtype), 16, 1, STREAM)
    held = [tensor.view(torch.uint8) for layer in pool.layers for tensor in layer]
    for tensor in held:
        tensor.random_(0, 100)
    before = [tensor.clone() for tensor in held]
    pool.move(torch.tensor([3, 4, 9]), torch.tensor([4, 5, 3]))
    for now, then in zip(held, before):
        assert torch.equal(now[[4, 5, 3]], then[[3, 4, 9]])
        others = [i for i in range(17) if i not in (3, 4, 5)]
        assert torch.equal(now[others], then[others])


def test_dummy_page_is_cleared_alone() -> None:
    pool = KVPool(KVSpec.gqa(1, 1, 2, torch.float32), 8, 4, STREAM)
    for tensor in pool.layers[0]:
        tensor.fill_(1.0)
    pool.clear_dummy_page()
    for tensor in pool.layers[0]:
        assert not tensor[:4].any() and tensor[4:].all()


@pytest.mark.parametrize(("slots", "page"), [(0, 1), (10, 4), (-4, 4)])
def test_bad_sizes(slots: int, page: int) -> None:
    with pytest.raises(ValueError, match="multiple of the page size"):
        KVPool(KVSpec.mla(1, 4, 4, torch.float32), slots, page, STREAM)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_unused_memory_is_not_taken() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    before = resident()
    pool = KVPool(KVSpec.mla(2, 512, 64, torch.bfloat16), 400_000, 1, STREAM)  # 0.9 GB
    pool.layers[1][100_000:100_100] = 1.0
    assert not pool.layers[1][:50].any()
    assert resident() - before < 50 << 20


@pytest.mark.parametrize(("kv_dtype", "row_bytes"), [("bfloat16", 2 * 80 + 2 * 24), ("fp8_e4m3", 96 + 28)])
def test_index_keys_beside_the_latent(kv_dtype: str, row_bytes: int, tmp_path: Path) -> None:
    """A second tensor per token: counted, allocated, written by the layer, and moved with the latent."""
    config = load_model_config(make_checkpoint("deepseek_v3", tmp_path / "model"))
    assert isinstance(config.attention, MLAConfig)
    indexed = dataclasses.replace(config.attention, kv_lora_rank=64, qk_rope_head_dim=16, index_width=24)
    model = dataclasses.replace(config, attention=indexed)
    assert model.kv_bytes_per_token(kv_dtype) == row_bytes * model.num_layers
    spec = kv_spec(model, kv_dtype)
    assert spec.bytes_per_token == row_bytes * model.num_layers
    pool = KVPool(spec, 16, 1, STREAM)
    latents, keys = zip(*pool.layers)
    assert len(latents) == model.num_layers and all(part.shape[:2] == (17, 1) for part in keys)
    assert sum(part.nbytes for layer in pool.layers for part in layer) == pool.num_bytes


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8_e4m3"])
@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_every_cache_tensor_makes_the_round_trip(kind: str, kv_dtype: str, tmp_path: Path) -> None:
    """All cache tensors of a text are moved to other slots, and read and written as bytes; the model continues with the
    same logits, and with other logits if one tensor of a layer is not moved."""
    config = load_model_config(make_checkpoint(kind, tmp_path / "model", tokenizer=False))
    pool = KVPool(kv_spec(config, kv_dtype), 512, 1, STREAM)
    backends = make_backends(config)
    stepper = Stepper(
        load_model(tmp_path / "model", config, LoadOptions("float32"), backends), config, backends, max_rows=2
    )
    stepper.slot_table += 1  # slot 0 is the dummy page
    stepper.kv = pool.layers
    tokens = torch.randint(0, 250, (50,)).tolist()
    stepper.step([Chunk(0, tokens[:40], False)])
    source, target = (stepper.slot_table[row].long() for row in stepper.row_of)
    want = stepper.step([Chunk(0, tokens[40:], False)])[0]

    def elsewhere() -> Tensor:
        stepper.lengths[1] = 40
        return stepper.step([Chunk(1, tokens[40:], False)])[0]

    pool.move(source[:40], target[:40])
    assert torch.equal(elsewhere(), want)
    stored = pool.read_rows(source[:40])
    assert stored.shape == (40, pool.spec.bytes_per_token)
    pool.write_rows(target[:40], torch.zeros_like(stored))
    pool.write_rows(target[:40], stored)
    assert torch.equal(elsewhere(), want)
    for tensor in pool.tensors():
        kept = tensor[target[:40]].clone()
        tensor[target[:40]] = 0
        assert not torch.equal(elsewhere(), want)
        tensor[target[:40]] = kept
    assert torch.equal(elsewhere(), want)
