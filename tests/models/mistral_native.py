"""Checkpoints in Mistral's own files (params.json, consolidated-*.safetensors) with the weights of transformers' model:
Mistral Large 3, whose class there is that of Mistral Small 4."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.mistral3_checkpoints import BREAK, END, IMAGE, Mistral3Oracle, make_mistral3

_TEXT = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "q_a_layernorm": "q_a_norm",
    "kv_a_layernorm": "kv_a_norm", "self_attn": "attention", "mlp.shared_experts": "shared_experts",
    "mlp.experts": "experts", "mlp.gate.": "gate.", "mlp": "feed_forward", "q_a_proj": "wq_a", "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a_with_mqa", "kv_b_proj": "wkv_b", "o_proj": "wo", "gate_proj": "w1",
    "down_proj": "w2", "up_proj": "w3", "model.layers": "layers",
}  # fmt: skip
_VISUAL = {
    "vision_tower.": "vision_encoder.", "multi_modal_projector.linear_1": "vision_language_adapter.w_in",
    "multi_modal_projector.linear_2": "vision_language_adapter.w_out", "multi_modal_projector.norm":
    "pre_mm_projector_norm", "multi_modal_projector.patch_merger": "patch_merger", "q_proj": "wq", "k_proj": "wk",
    "v_proj": "wv", "o_proj": "wo", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
}  # fmt: skip
TOWER = ("vision_", "pre_mm_projector_norm.", "patch_merger.")
"""Prefixes of the names of the tower and its projector."""
Writer = Callable[[str, Tensor], dict[str, Tensor]]


def make_mistral_large3(
    path: Path, seed: int, write: Writer | None = None, tower: dict[str, Any] | None = None, **more: Any
) -> Mistral3Oracle:
    """Writes the checkpoint. `write`: the stored tensors of a projection of the text model, by name and values.
    `tower`, `more`: fields of tower and text model."""
    fields = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6, "num_hidden_layers": 3}
    made = make_mistral3(path / "source", seed, "mistral4", tower=tower, **fields | more)
    made.model.model.multi_modal_projector.norm.variance_epsilon = 1e-5  # as in Mistral's own code
    raw = json.loads((path / "source" / "config.json").read_text())
    tensors = native_tensors(load_file(path / "source" / "model.safetensors"), raw)
    if write is not None:
        tensors = {k: t for name, value in tensors.items() for k, t in _written(write, name, value).items()}
    (path / "params.json").write_text(json.dumps(params(raw)))
    names = sorted(tensors)
    files = {f"consolidated-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, held in files.items():
        save_file({name: tensors[name].contiguous() for name in held}, path / file)
    index = {name: file for file, held in files.items() for name in held}
    (path / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(path / "source" / name, path / name)
    shutil.rmtree(path / "source")
    return Mistral3Oracle(path, made.model)


def make_mistral_large3_text(path: Path, seed: int, tokenizer: bool = True, **more: Any) -> Path:
    """The same without a tower."""
    make_mistral_large3(path, seed, **more)
    raw = json.loads((path / "params.json").read_text())
    del raw["vision_encoder"]
    (path / "params.json").write_text(json.dumps(raw))
    for file in path.glob("consolidated-*.safetensors"):
        save_file({k: t for k, t in load_file(file).items() if not k.startswith(TOWER)}, file)
    (path / "consolidated.safetensors.index.json").unlink()
    return path


def _written(write: Writer, name: str, value: Tensor) -> dict[str, Tensor]:
    projection = name.startswith("layers.") and value.ndim == 2 and ".gate." not in name
    return write(name, value) if projection else {name: value}


def native_tensors(tensors: dict[str, Tensor], raw: dict[str, Any]) -> dict[str, Tensor]:
    """From transformers' names and order of rotated channels."""
    found = {}
    heads = raw["vision_config"]["num_attention_heads"]
    for name, tensor in tensors.items():
        name = name.removeprefix("language_model.")
        if not name.startswith(("vision_tower.", "multi_modal_projector.")):
            for key, value in _experts(name, tensor).items():
                found[_renamed(key, _TEXT)] = value
            continue
        if re.search(r"\.[qk]_proj\.", name):  # pairs (j, j + Dh/2) -> (2j, 2j+1)
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        found[_renamed(name, _VISUAL)] = tensor
    return found


def _experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Matrices of each expert from common tensors."""
    if name.endswith("experts.gate_up_proj"):
        block = name.removesuffix("gate_up_proj")
        halves = (both.chunk(2) for both in tensor)
        return {f"{block}{i}.{part}_proj.weight": half for i, pair in enumerate(halves)
                for part, half in zip(("gate", "up"), pair)}  # fmt: skip
    if name.endswith("experts.down_proj"):
        return {name.replace("down_proj", f"{i}.down_proj.weight"): own for i, own in enumerate(tensor)}
    return {name: tensor}


def _renamed(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def params(raw: dict[str, Any]) -> dict[str, Any]:
    """params.json with the settings of transformers' config.json."""
    text, vision = raw["text_config"], raw["vision_config"]
    rope = text.get("rope_parameters") or text["rope_scaling"]
    length = rope["original_max_position_embeddings"]
    return {
        "dim": text["hidden_size"], "n_layers": text["num_hidden_layers"], "head_dim": text["v_head_dim"],
        "hidden_dim": text["intermediate_size"], "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_attention_heads"], "rope_theta": rope["rope_theta"], "norm_eps": text["rms_norm_eps"],
        "vocab_size": text["vocab_size"], "tied_embeddings": False,
        "max_position_embeddings": text["max_position_embeddings"],
        **{key: text[key] for key in (
            "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
        )},
        "llama_4_scaling": {"original_max_position_embeddings": length, "beta": rope["llama_4_scaling_beta"]},
        "yarn": {
            "original_max_position_embeddings": length, "factor": rope["factor"], "beta": rope["beta_fast"],
            "alpha": rope["beta_slow"], "apply_scale": bool(rope.get("mscale_all_dim")),
        },
        "moe": {
            "expert_parallel": 1, "expert_model_parallel": 1, "route_every_n": 1,
            "first_k_dense_replace": text["first_k_dense_replace"], "num_experts": text["n_routed_experts"],
            "num_experts_per_tok": text["num_experts_per_tok"], "num_expert_groups": text["n_group"],
            "num_expert_groups_per_tok": text["topk_group"], "routed_scale": text["routed_scaling_factor"],
            "expert_hidden_dim": text["moe_intermediate_size"], "num_shared_experts": text["n_shared_experts"],
        },
        "vision_encoder": {
            "image_token_id": IMAGE, "image_break_token_id": BREAK, "image_end_token_id": END,
            "intermediate_size": vision["intermediate_size"], "num_hidden_layers": vision["num_hidden_layers"],
            "num_attention_heads": vision["num_attention_heads"], "mm_projector_id": "patch_merge",
            "spatial_merge_size": raw["spatial_merge_size"], "hidden_size": vision["hidden_size"],
            "num_channels": vision.get("num_channels", 3), "image_size": 64, "max_image_size": 64,
            "patch_size": vision["patch_size"], "rope_theta": vision["rope_parameters"]["rope_theta"],
            "add_pre_mm_projector_layer_norm": True, "adapter_bias": raw["multimodal_projector_bias"],
        },
    }  # fmt: skip
