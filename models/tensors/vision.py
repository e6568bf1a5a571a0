"""Tensors of a vision tower, by their names in the checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moe_engine.models.config_sections.vision import (
    COHERE2,
    DEEPSEEK_V41,
    GEMMA3,
    GLM4V,
    GLM5_NEXT,
    KIMI,
    KIMI_K3,
    LLAMA4,
    MINIMAX_M3,
    PIXTRAL,
    PIXTRAL_12B,
    PIXTRAL_NATIVE,
    QWEN2,
    QWEN2_5,
    QWEN3,
    VisionConfig,
)

PREFIX = "visual."
AUDIO = "audio_encoder.", "speech_embeddings."
"""Begins of the names of audio towers, which are not served (MiMo-V2.5)."""
POOLING_HEAD = "visual.head."
"""Begin of the names of SigLIP's pooling head, which no model for images and text reads."""
DELIMITERS = ("image_start", "image_newline", "image_end")
"""Embeddings before an image, after each of its rows and after it (DeepSeek V4.1)."""
Entry = tuple[str, tuple[int, ...], bool]
"""Name, shape, and whether the tensor is kept in float32."""


def vision_tensors(vision: VisionConfig) -> Iterator[Entry]:
    """All tensors of the tower."""
    for name, shape, wide in _BY_TOWER[vision.tower](vision):
        yield PREFIX + name, shape, wide


def _linear(name: str, rows: int, columns: int) -> Iterator[Entry]:
    yield f"{name}.weight", (rows, columns), False
    yield f"{name}.bias", (rows,), False


def _qwen2(v: VisionConfig) -> Iterator[Entry]:
    yield "patch_embed.proj.weight", patch_shape(v), False
    for i in range(v.num_layers):
        yield from _block(f"blocks.{i}", v, ("norm1", "norm2"), ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"))
    yield from _layer_norm("merger.ln_q", v.width)
    yield from _linear("merger.mlp.0", v.merged_width, v.merged_width)
    yield from _linear("merger.mlp.2", v.out_width, v.merged_width)


def _qwen2_5(v: VisionConfig) -> Iterator[Entry]:
    yield "patch_embed.proj.weight", patch_shape(v), False
    for i in range(v.num_layers):
        block = f"blocks.{i}"
        yield f"{block}.norm1.weight", (v.width,), True
        yield f"{block}.norm2.weight", (v.width,), True
        yield from _linear(f"{block}.attn.qkv", 3 * v.width, v.width)
        yield from _linear(f"{block}.attn.proj", v.width, v.width)
        yield from _linear(f"{block}.mlp.gate_proj", v.intermediate, v.width)
        yield from _linear(f"{block}.mlp.up_proj", v.intermediate, v.width)
        yield from _linear(f"{block}.mlp.down_proj", v.width, v.intermediate)
    yield "merger.ln_q.weight", (v.width,), True
    yield from _linear("merger.mlp.0", v.merged_width, v.merged_width)
    yield from _linear("merger.mlp.2", v.out_width, v.merged_width)


def _qwen3(v: VisionConfig) -> Iterator[Entry]:
    yield "patch_embed.proj.weight", patch_shape(v), False
    yield "patch_embed.proj.bias", (v.width,), False
    yield "pos_embed.weight", (v.num_positions, v.width), False
    for i in range(v.num_layers):
        linear = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
        yield from _block(f"blocks.{i}", v, ("norm1", "norm2"), linear)
    yield from _merger("merger", v, v.width)
    for i in range(len(v.deepstack_layers)):
        yield from _merger(f"deepstack_merger_list.{i}", v, v.merged_width)


def _kimi(v: VisionConfig) -> Iterator[Entry]:
    side = int(v.num_positions**0.5)
    yield "patch_embed.proj.weight", patch_shape(v), False
    yield "patch_embed.proj.bias", (v.width,), False
    yield "patch_embed.pos_emb.weight", (side, side, v.width), False
    for i in range(v.num_layers):
        yield from _block(f"encoder.blocks.{i}", v, ("norm0", "norm1"), ("wqkv", "wo", "mlp.fc0", "mlp.fc1"))
    yield from _layer_norm("encoder.final_layernorm", v.width)
    yield from _layer_norm("mm_projector.pre_norm", v.width)
    yield from _linear("mm_projector.proj.0", v.merged_width, v.merged_width)
    yield from _linear("mm_projector.proj.2", v.out_width, v.merged_width)


def _kimi_k3(v: VisionConfig) -> Iterator[Entry]:
    side, inner = int(v.num_positions**0.5), v.num_heads * v.head_dim
    yield "patch_embed.proj.weight", patch_shape(v), False
    yield "patch_embed.pos_emb.weight", (side, side, v.width), False
    for i in range(v.num_layers):
        block = f"encoder.blocks.{i}"
        yield f"{block}.norm0.weight", (v.width,), False
        yield f"{block}.norm1.weight", (v.width,), False
        yield f"{block}.wqkv.weight", (3 * inner, v.width), False
        yield f"{block}.wo.weight", (v.width, inner), False
        yield f"{block}.mlp.fc0.weight", (v.intermediate, v.width), False
        yield f"{block}.mlp.fc1.weight", (v.width, v.intermediate), False
    yield "encoder.final_layernorm.weight", (v.width,), False
    yield "mm_projector.proj.0.weight", (v.merged_width, v.merged_width), False
    yield "mm_projector.proj.2.weight", (v.out_width, v.merged_width), False
    yield "mm_projector.post_norm.weight", (v.out_width,), False


def _deepseek_v41(v: VisionConfig) -> Iterator[Entry]:
    yield "patch_embed.proj.weight", patch_shape(v), False
    yield "patch_embed.proj.bias", (v.width,), False
    for i in range(v.num_layers):
        block = f"blocks.{i}"
        for norm in ("norm1", "norm2"):
            yield f"{block}.{norm}.weight", (v.width,), True
        yield from _linear(f"{block}.attn.wqkv", 3 * v.width, v.width)
        yield from _linear(f"{block}.attn.wo", v.width, v.width)
        yield f"{block}.mlp.w1.weight", (2 * v.intermediate, v.width), False
        yield f"{block}.mlp.w2.weight", (v.width, v.intermediate), False
    yield "norm.weight", (v.width,), True
    yield from _linear("aligner.w1", v.out_width, v.merged_width)
    yield from _linear("aligner.w2", v.out_width, v.out_width)
    for delimiter in DELIMITERS:
        yield delimiter, (v.out_width,), False


def _glm5_next(v: VisionConfig) -> Iterator[Entry]:
    yield "patch_embed.proj.weight", patch_shape(v), False
    yield "patch_embed.proj.bias", (v.width,), False
    shapes = {"attn.qkv": (3 * v.width, v.width), "attn.proj": (v.width, v.width)}
    shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (v.intermediate, v.width))
    shapes["mlp.down_proj"] = v.width, v.intermediate
    norms = {"norm1": v.width, "norm2": v.width, "attn.q_norm": v.head_dim, "attn.k_norm": v.head_dim}
    for i in range(v.num_layers):
        for norm, width in norms.items():
            yield f"blocks.{i}.{norm}.weight", (width,), True
        for name, shape in shapes.items():
            entries = _linear(f"blocks.{i}.{name}", *shape)
            yield from entries if v.bias else [next(entries)]
    yield from _glm_projector(v)


def _glm4v(v: VisionConfig) -> Iterator[Entry]:
    yield "patch_embed.proj.weight", patch_shape(v), False
    yield "patch_embed.proj.bias", (v.width,), False
    yield "post_conv_layernorm.weight", (v.width,), True
    yield "embeddings.position_embedding.weight", (v.num_positions, v.width), False
    for i in range(v.num_layers):
        block = f"blocks.{i}"
        for norm in ("norm1", "norm2"):
            yield f"{block}.{norm}.weight", (v.width,), True
        entries = _linear(f"{block}.attn.qkv", 3 * v.width, v.width)
        yield from entries if v.bias else [next(entries)]
        yield f"{block}.attn.proj.weight", (v.width, v.width), False
        for part in ("gate_proj", "up_proj"):
            yield f"{block}.mlp.{part}.weight", (v.intermediate, v.width), False
        yield f"{block}.mlp.down_proj.weight", (v.width, v.intermediate), False
    yield from _glm_projector(v)


def _glm_projector(v: VisionConfig) -> Iterator[Entry]:
    yield "post_layernorm.weight", (v.width,), True
    yield "downsample.weight", (v.out_width, v.width, v.merge, v.merge), False
    yield "downsample.bias", (v.out_width,), False
    yield "merger.proj.weight", (v.out_width, v.out_width), False
    yield from _layer_norm("merger.post_projection_norm", v.out_width)
    for name in ("gate_proj", "up_proj"):
        yield f"merger.{name}.weight", (v.projector_width, v.out_width), False
    yield "merger.down_proj.weight", (v.out_width, v.projector_width), False


def _pixtral(v: VisionConfig) -> Iterator[Entry]:
    native = v.tower == PIXTRAL_NATIVE
    yield "patch_conv.weight", patch_shape(v), False
    yield "ln_pre.weight", (v.width,), True
    for i in range(v.num_layers):
        block = f"transformer.layers.{i}"
        yield f"{block}.attention_norm.weight", (v.width,), True
        yield f"{block}.ffn_norm.weight", (v.width,), True
        gate, up, down = ("w1", "w3", "w2") if native else ("gate_proj", "up_proj", "down_proj")
        for part in "qkvo":
            name = f"w{part}" if native else f"{part}_proj"
            yield f"{block}.attention.{name}.weight", (v.width, v.width), False
        for part in (gate, up):
            yield f"{block}.feed_forward.{part}.weight", (v.intermediate, v.width), False
        yield f"{block}.feed_forward.{down}.weight", (v.width, v.intermediate), False
    if v.tower != PIXTRAL_12B:
        yield "projector.norm.weight", (v.width,), True
        yield "projector.patch_merger.merging_layer.weight", (v.width, v.merged_width), False
    for name, columns in (("linear_1", v.width), ("linear_2", v.out_width)):
        entries = _linear(f"projector.{name}", v.out_width, columns)
        yield from entries if v.projector_bias else [next(entries)]


def _minimax_m3(v: VisionConfig) -> Iterator[Entry]:
    yield "embeddings.patch_embedding.weight", patch_shape(v), False
    yield from _layer_norm("pre_layrnorm", v.width)
    yield from _clip_blocks(v)
    for name, columns in (("projector", v.width), ("merge_mlp", v.out_width * v.merge**2)):
        yield from _linear(f"{name}.linear_1", v.projector_width, columns)
        yield from _linear(f"{name}.linear_2", v.out_width, v.projector_width)


def _llama4(v: VisionConfig) -> Iterator[Entry]:
    yield "class_embedding", (v.width,), False
    yield "positional_embedding_vlm", (v.num_positions, v.width), False
    yield "patch_embedding.linear.weight", patch_shape(v), False
    yield from _layer_norm("layernorm_pre", v.width)
    for i in range(v.num_layers):
        block = f"model.layers.{i}"
        yield from _layer_norm(f"{block}.input_layernorm", v.width)
        yield from _layer_norm(f"{block}.post_attention_layernorm", v.width)
        for part in "qkvo":
            yield from _linear(f"{block}.self_attn.{part}_proj", v.width, v.width)
        yield from _linear(f"{block}.mlp.fc1", v.intermediate, v.width)
        yield from _linear(f"{block}.mlp.fc2", v.width, v.intermediate)
    yield from _layer_norm("layernorm_post", v.width)
    yield "vision_adapter.mlp.fc1.weight", (v.projector_width, v.merged_width), False
    yield "vision_adapter.mlp.fc2.weight", (v.projector_width, v.projector_width), False
    yield "projector.linear_1.weight", (v.out_width, v.projector_width), False


def _siglip(v: VisionConfig) -> Iterator[Entry]:
    yield "embeddings.patch_embedding.weight", patch_shape(v), False
    yield "embeddings.patch_embedding.bias", (v.width,), False
    yield "embeddings.position_embedding.weight", (v.num_positions, v.width), False
    yield from _clip_blocks(v)
    yield from _layer_norm("post_layernorm", v.width)


def _gemma3(v: VisionConfig) -> Iterator[Entry]:
    yield from _siglip(v)
    yield "projector.mm_input_projection_weight", (v.width, v.out_width), False
    yield "projector.mm_soft_emb_norm.weight", (v.width,), True


def _cohere2(v: VisionConfig) -> Iterator[Entry]:
    yield from _siglip(v)
    yield from _linear("projector.linear_1", 2 * v.projector_width, v.merged_width)
    yield from _linear("projector.linear_2", v.out_width, v.projector_width)


def _clip_blocks(v: VisionConfig) -> Iterator[Entry]:
    for i in range(v.num_layers):
        block = f"encoder.layers.{i}"
        yield from _layer_norm(f"{block}.layer_norm1", v.width)
        yield from _layer_norm(f"{block}.layer_norm2", v.width)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{block}.self_attn.{part}", v.width, v.width)
        yield from _linear(f"{block}.mlp.fc1", v.intermediate, v.width)
        yield from _linear(f"{block}.mlp.fc2", v.width, v.intermediate)


def _block(name: str, v: VisionConfig, norms: tuple[str, str], linear: tuple[str, str, str, str]) -> Iterator[Entry]:
    """A transformer block with layer norms, by the names of its parts: linear layers of q, k and v, of the output, and
    both of the MLP."""
    for norm in norms:
        yield from _layer_norm(f"{name}.{norm}", v.width)
    shapes = ((3 * v.width, v.width), (v.width, v.width), (v.intermediate, v.width), (v.width, v.intermediate))
    for part, shape in zip(linear, shapes):
        yield from _linear(f"{name}.{part}", *shape)


def _merger(name: str, v: VisionConfig, norm_width: int) -> Iterator[Entry]:
    yield from _layer_norm(f"{name}.norm", norm_width)
    yield from _linear(f"{name}.linear_fc1", v.merged_width, v.merged_width)
    yield from _linear(f"{name}.linear_fc2", v.out_width, v.merged_width)


def _layer_norm(name: str, width: int) -> Iterator[Entry]:
    yield f"{name}.weight", (width,), False
    yield f"{name}.bias", (width,), False


_BY_TOWER: dict[str, Callable[[VisionConfig], Iterator[Entry]]] = {
    COHERE2: _cohere2,
    DEEPSEEK_V41: _deepseek_v41,
    GEMMA3: _gemma3,
    GLM4V: _glm4v,
    GLM5_NEXT: _glm5_next,
    KIMI: _kimi,
    KIMI_K3: _kimi_k3,
    LLAMA4: _llama4,
    MINIMAX_M3: _minimax_m3,
    PIXTRAL: _pixtral,
    PIXTRAL_12B: _pixtral,
    PIXTRAL_NATIVE: _pixtral,
    QWEN2: _qwen2,
    QWEN2_5: _qwen2_5,
    QWEN3: _qwen3,
}


def patch_shape(v: VisionConfig) -> tuple[int, ...]:
    """Shape of the convolution over patches, whose stride is its size: a product with the patch's numbers in order,
    stored as such for DeepSeek V4.1 and Llama 4. A tower for single frames (temporal patch size 1) has one over rows
    and columns."""
    if v.tower in (DEEPSEEK_V41, LLAMA4):
        return v.width, v.patch_width
    frames = (v.temporal_patch_size,) * (v.temporal_patch_size > 1)
    return v.width, v.channels, *frames, v.patch_size, v.patch_size
