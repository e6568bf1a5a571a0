"""Weights read and replaced by name, in every form of engine, although kernels pack, merge and shard them."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine import Engine
from moe_engine.errors import InputError
from moe_engine.models.quantized_copy.checkpoint import quantize_checkpoint
from moe_engine.models.quantized_copy.target import Target
from tests.distributed.engine.test_weight_updates import (  # noqa: F401
    DRAFTS,
    FORMS,
    PROMPTS,
    SAMPLING,
    Answers,
    checkpoints,
    expected,
    open_engine,
    tokens,
    under_load,
)
from tests.models.checkpoints import join_experts, make_checkpoint
from tests.models.deepseek_v41 import make_v41
from tests.models.fp8 import dequantize_fp8

pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.drawn(4)]

COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of an engine with drafts."""
    tensors = load_file(path / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "layers" not in name or not name.endswith(COPIES)}


def one_of_each(names: list[str]) -> list[str]:
    """A tensor of each kind, of random layers and experts."""
    by_kind: dict[str, list[str]] = {}
    for name in names:
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        by_kind.setdefault(kind, []).append(name)
    return [random.choice(group) for group in by_kind.values()]


def assert_held(engine: Engine, wanted: dict[str, torch.Tensor], names: list[str], num_rows: int = 100) -> None:
    for name in names:
        found = engine.get_weights_by_name(name, num_rows)
        for replica in found if engine.config.args.parallel.dp_size > 1 else [found]:
            assert torch.equal(torch.tensor(replica), wanted[name][:num_rows].float()), name


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=[] if form in ("one rank", "ep2") else pytest.mark.exhaustive) for form in FORMS],
)
def test_weights_are_replaced_in_two_parts(
    checkpoints: dict[str, Path],  # noqa: F811
    expected: dict[str, list[list[int]]],  # noqa: F811
    form: str,
) -> None:
    old, new = (weights(checkpoints[name]) for name in ("old", "new"))
    names = [name for name in old if form != "two replicas" or "layers.3." not in name]
    first = set(random.sample(names, len(names) // 2))
    with open_engine(checkpoints["old"], **FORMS[form]) as engine:
        some = one_of_each(names)
        assert_held(engine, old, some)
        engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)  # leaves cached prefixes
        assert engine.update_weights_from_tensor([(name, new[name]) for name in first]) == (
            True, "Succeeded to update model weights from tensors.",
        )  # fmt: skip
        mixed = {name: (new if name in first else old)[name] for name in names}
        assert_held(engine, mixed, one_of_each(names))
        rest = [(name, new[name]) for name in new if name not in first]
        assert engine.update_weights_from_tensor(rest, weight_version="new")[0]
        outputs: Any = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
        assert [output["output_ids"] for output in outputs] == expected["new"]
        assert {output["meta_info"]["weight_version"] for output in outputs} == {"new"}


@pytest.mark.parametrize(
    ("kind", "row", "dtype", "stored"),
    [
        ("qwen3", "cpu", "bfloat16", "float32"),
        ("qwen3_moe", "torch", "float32", "bfloat16"),
        ("qwen3_moe", "cpu", "bfloat16", "bfloat16"),
        ("mixtral", "cpu", "float32", "float32"),
    ],
)
def test_families_and_kernels(tmp_path: Path, kind: str, row: str, dtype: str, stored: str) -> None:
    """Also with routers that stay in bfloat16, as the checkpoint stores them."""
    old, new = (make_checkpoint(kind, tmp_path / str(i), i, dtype=stored, tokenizer=False) for i in (1, 2))
    before, after = (load_file(path / "model.safetensors") for path in (old, new))
    rows = {} if row == "cpu" else {"linear_backend": "torch", "moe_runner_backend": "torch"}
    with open_engine(old, **{**rows, "dtype": dtype}) as engine:
        wanted = dict(before)
        for name in one_of_each(sorted(before)):
            wanted[name] = after[name]
        changed = [(name, wanted[name]) for name in wanted if wanted[name] is not before[name]]
        assert engine.update_weights_from_tensor(changed)[0]
        wide = ("norm.weight", ".gate.weight")
        held = {
            name: tensor if name.endswith(wide) else tensor.to(getattr(torch, dtype)) for name, tensor in wanted.items()
        }
        assert_held(engine, held, [name for name, _ in changed], 7)
        assert_held(engine, held, one_of_each(sorted(before)), 1000)


def test_quantized_weights_arrive_with_their_scales(tmp_path: Path) -> None:
    """Quantized in the checkpoint, dequantized for the kernels of this machine."""
    old, new = (make_checkpoint("deepseek_v3", tmp_path / str(i), i, tokenizer=False, fp8=True) for i in (1, 2))
    before, after = (load_file(path / "model.safetensors") for path in (old, new))
    plain = {name: dequantize_fp8(tensors, dtype=torch.float32) for name, tensors in (("old", before), ("new", after))}
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    scale = name.replace("weight", "weight_scale_inv")
    with open_engine(old) as engine:
        assert_held(engine, plain["old"], [name, "model.layers.1.mlp.experts.3.up_proj.weight"])
        assert engine.update_weights_from_tensor([(key, after[key]) for key in (name, scale)])[0]
        assert_held(engine, plain["new"], [name])
        assert_held(engine, plain["old"], [name.replace("kv_b", "o"), name.replace(".1.", ".0.")])
        assert engine.update_weights_from_tensor([(name, plain["old"][name])])[0]
        assert_held(engine, plain["old"], [name])
        done, why = engine.update_weights_from_tensor([(name, after[name])])
        assert not done and "needs a weight_scale_inv" in why
        with pytest.raises(InputError, match="dequantized at load"):
            engine.get_weights_by_name(scale)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "llama4", "int4"])
def test_tensors_with_other_names_than_the_model(tmp_path: Path, kind: str) -> None:
    """All experts of a layer in common tensors, and packed integers with their scales: some, then all."""
    family = "qwen3_moe" if kind == "int4" else kind
    old, new = (make_checkpoint(family, tmp_path / str(i), i, dtype="float32", tokenizer=False) for i in (1, 2))
    if kind == "qwen3_moe":
        for path in (old, new):
            join_experts(path)
    if kind == "int4":
        old, new = (_quantized(path) for path in (old, new))
    before, after = (load_file(path / "model.safetensors") for path in (old, new))
    end = ".weight_packed" if kind == "int4" else ".experts.down_proj"
    first = random.choice([name for name in after if name.endswith(end)]).removesuffix(end)
    some = [name for name in after if name.startswith(f"{first}{end.rpartition('.')[0]}.")]
    assert not any(name.endswith("_proj.weight") for name in some)
    mixed = shutil.copytree(old, tmp_path / "mixed")
    save_file(before | {name: after[name] for name in some}, mixed / "model.safetensors")
    # codes are dequantized where no row multiplies them; others cannot be replaced by name
    rows = {"linear_backend": "torch", "moe_runner_backend": "torch"} if kind == "int4" else {}
    right = {}
    for path in (mixed, new):
        with open_engine(path, **rows) as engine:
            right[path] = tokens(engine)
    assert right[mixed] != right[new]
    with open_engine(old, **rows) as engine:
        done, why = engine.update_weights_from_tensor([(some[0], after[some[0]][:1])])
        assert not done and some[0] in why
        for path, names in ((mixed, some), (new, after)):
            done, why = engine.update_weights_from_tensor([(name, after[name]) for name in names])
            assert done, why
            assert tokens(engine) == right[path]


def _quantized(path: Path) -> Path:
    quantize_checkpoint(path, output := path.with_name(f"{path.name} int4"), Target("int4", 32), lambda _: None)
    return output


@pytest.mark.parametrize("kind", ["qwen4_exp", pytest.param("deepseek_v41", marks=pytest.mark.exhaustive)])
def test_tables_of_ngrams_are_replaced(tmp_path: Path, kind: str) -> None:
    """Alone, and then all other tensors; a part of a table is refused."""
    make: Callable[..., Path] = make_v41 if kind == "deepseek_v41" else partial(make_checkpoint, kind, tokenizer=False)
    old, new = (make(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    sent = load_file(new / "model.safetensors")
    tables = {name for name in sent if ".engram.embed." in name or ".ngram_embedding." in name}
    mixed = load_file(old / "model.safetensors") | {name: sent[name] for name in tables}
    shutil.copytree(old, tmp_path / "mixed")
    save_file(mixed, tmp_path / "mixed" / "model.safetensors")
    wanted = []
    for path in (tmp_path / "mixed", new):
        with open_engine(path) as engine:
            wanted.append(tokens(engine))
    with open_engine(old, tp_size=2) as engine:
        if kind == "qwen4_exp":
            done, why = engine.update_weights_from_tensor([(name, sent[name]) for name in sorted(tables)[1:]])
            assert not done and "send all tensors of a table" in why
        assert engine.update_weights_from_tensor([(name, sent[name]) for name in tables])[0]
        assert tokens(engine) == wanted[0]
        rest = [(name, tensor) for name, tensor in sent.items() if name not in tables]
        assert engine.update_weights_from_tensor(rest)[0]
        assert tokens(engine) == wanted[1]


def spoiled(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with one wrong value."""
    copy = tensor.clone()
    copy.view(-1)[random.randrange(copy.numel())] = value
    return copy


def test_wrong_tensors_change_nothing(checkpoints: dict[str, Path]) -> None:  # noqa: F811
    new = weights(checkpoints["new"])
    name = "model.layers.1.self_attn.o_proj.weight"
    wrong = {
        f"{name} has shape": [(name, new[name][:, :-1])],
        f"'{name}s' is no tensor of the served model; similar: {name}": [(f"{name}s", new[name])],
        "has dtype U8": [(name, new[name].to(torch.uint8))],
        "has dtype I64": [(name, new[name].to(torch.int64))],
        "twice": [(name, new[name])] * 2,
        f"tensor {name} has values that are NaN": [(name, spoiled(new[name], float("nan")))],
        f"tensor {name} has values that are NaN or infinite in": [(name, spoiled(new[name], -float("inf")))],
        "send both": [(name.replace("weight", "weight_scale_inv"), torch.ones(1, 1))],
    }
    with open_engine(checkpoints["old"], tp_size=2, **DRAFTS) as engine:
        right = [("model.norm.weight", new["model.norm.weight"])]
        for why, tensors in wrong.items():
            done, message = engine.update_weights_from_tensor(right + tensors)
            assert not done and why in message, message
        assert_held(engine, weights(checkpoints["old"]), ["model.norm.weight", name])
        with pytest.raises(InputError, match=f"similar: .*{name}"):
            engine.get_weights_by_name(name.replace("o_proj", "out_proj"))
        assert not engine.update_weights_from_tensor(right, load_format="direct")[0]


def test_no_answer_mixes_weights(checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]) -> None:  # noqa: F811
    tensors = {name: list(weights(path).items()) for name, path in checkpoints.items()}
    with open_engine(checkpoints["old"], weight_version="old", **DRAFTS) as engine:

        async def work(answers: Answers) -> None:
            for version in ("new", "old", "new"):
                count = len(answers)
                while len(answers) < count + len(PROMPTS):
                    await asyncio.sleep(0.01)
                done = await asyncio.get_running_loop().run_in_executor(
                    None, lambda v=version: engine.update_weights_from_tensor(tensors[v], weight_version=v)
                )
                assert done[0], done

        answers = asyncio.run(under_load(engine, work))
    assert {version for _, version, _, _ in answers} == {"old", "new"}
    for number, version, _, found in answers:
        assert found == expected[version][number], (number, version)
