"""Config of a vision tower, and the families that have one. Imports no torch.

Legend: P patches of an image, M patches of a token in one direction (merge size), N tokens of an image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

QWEN2 = "moe_engine.models.vision.qwen2_vl:Qwen2Tower"
QWEN2_5 = "moe_engine.models.vision.qwen2_5_vl:Qwen25Tower"
QWEN3 = "moe_engine.models.vision.qwen3_vl:Qwen3Tower"
COHERE2 = "moe_engine.models.vision.cohere2:Cohere2Tower"
KIMI = "moe_engine.models.vision.kimi_k25:KimiTower"
KIMI_K3 = "moe_engine.models.vision.kimi_k3:KimiK3Tower"
DEEPSEEK_V41 = "moe_engine.models.vision.deepseek_v41:DeepseekV41Tower"
PIXTRAL = "moe_engine.models.vision.pixtral:PixtralTower"
GEMMA3 = "moe_engine.models.vision.gemma3:Gemma3Tower"
GLM4V = "moe_engine.models.vision.glm4v:Glm4vTower"
GLM5_NEXT = "moe_engine.models.vision.glm5_next:Glm5NextTower"
LLAMA4 = "moe_engine.models.vision.llama4:Llama4Tower"
MINIMAX_M3 = "moe_engine.models.vision.minimax_m3:MiniMaxM3Tower"
PIXTRAL_NATIVE = "moe_engine.models.vision.pixtral:NativePixtralTower"
PIXTRAL_12B = "moe_engine.models.vision.pixtral:UnmergedTower"
"""Values of `VisionConfig.tower`."""
GATED_PROJECTORS = COHERE2, GLM4V, GLM5_NEXT
"""Towers whose projector has a gate, after the product that joins the patches of a token."""


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower and its tokens in the text.

    Attributes:
        tower: dotted path of the tower's class.
        width, num_layers, num_heads, intermediate: of the transformer over patches.
        patch_size, temporal_patch_size, channels: of a patch's pixels.
        merge: M.
        attention_width: of queries, keys and values, where it is not `width`.
        window: side of an attention window in pixels, for the layers outside `full_layers`; 0: no windows.
        out_width: channels of a token's embedding, those of the text model.
        num_positions: rows of the learned position table; 0: none.
        deepstack_layers: layers whose states are added to the first layers of the text model too.
        image_token, video_token: placeholder tokens of the text.
        max_patches: patches of the largest accepted image.
        norm_eps, theta: epsilon of the norms, base of the rotary frequencies.
        activation: of the MLP without a gate, or of the gate. limit: clamps gate (from above) and up; 0: no clamp.
        bias: of the products of a block, where they may have none.
        projector_eps, projector_bias: of the projector, where it differs.
        projector_width: channels inside the projector, where they are not those of a token.
        row_ends: tokens of the text after each row of an image's tokens and after the last one; None: there are none.
        delimited: the tower has rows of its own before an image, after each of its rows and after it, and fills up
            the tokens at its edges.
        around: tokens of the text before and after an image's tokens, which a prompt's placeholder does not have.
        size_marks: special tokens before a placeholder, between which the size of the image is written.
        tile: patches of a tile in one direction, where an image is cut into tiles; more than one have a tile of the
            whole image after them, which its grid does not count. 0: no tiles.
        tile_marks: tokens of the text between the tiles of a row, after a row of tiles, and before the last tile; a
            single one: after each tile.
        side: patches of an image in one direction, where all images have one size; 0: they differ.
        sees_whole: the tokens of an image attend to all tokens of the image, also to later ones.
        written: the text of a prompt's placeholder, and the text that stands for it before the prompt is tokenized.
    """

    tower: str
    width: int
    num_layers: int
    num_heads: int
    intermediate: int
    patch_size: int
    temporal_patch_size: int
    channels: int
    merge: int
    out_width: int
    image_token: int
    video_token: int | None
    attention_width: int = 0
    window: int = 0
    full_layers: tuple[int, ...] = ()
    num_positions: int = 0
    deepstack_layers: tuple[int, ...] = ()
    max_patches: int = 0
    norm_eps: float = 1e-6
    theta: float = 10000.0
    activation: str = "silu"
    limit: float = 0.0
    bias: bool = True
    projector_eps: float = 1e-6
    projector_bias: bool = False
    projector_width: int = 0
    row_ends: tuple[int, int] | None = None
    delimited: bool = False
    around: tuple[int, int] | None = None
    size_marks: tuple[str, str] | None = None
    tile: int = 0
    tile_marks: tuple[int, ...] | None = None
    side: int = 0
    sees_whole: bool = False
    written: tuple[str, str] | None = None

    @property
    def patch_width(self) -> int:
        """Numbers of a patch from the image processor."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def head_dim(self) -> int:
        return (self.attention_width or self.width) // self.num_heads

    @property
    def merged_width(self) -> int:
        """Channels of all patches of a token."""
        return self.width * self.merge**2

    @property
    def row_width(self) -> int:
        """Numbers that the tower computes for a token: its embedding, and the rows of deepstack layers."""
        return self.out_width * (1 + len(self.deepstack_layers))

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens of an image of (frames, rows, columns) patches."""
        frames, rows, columns = grid
        if self.tile:  # with a mark at each tile
            tiles = (rows // self.tile) * (columns // self.tile)
            return (tiles + (tiles > 1)) * ((self.tile // self.merge) ** 2 + 1)
        if self.delimited:
            return -(-rows // self.merge) * (-(-columns // self.merge) + 1) + 2
        return frames * (rows // self.merge) * (columns // self.merge + (self.row_ends is not None))

    def most_tokens(self, patches: int) -> int:
        """Tokens of a square image of that many patches, of tiles one of the whole among them."""
        if self.tile:
            return patches // self.tile**2 * ((self.tile // self.merge) ** 2 + 1)
        if self.delimited:
            side = math.isqrt(patches)
            return self.num_tokens((1, side, side))
        tokens = patches // self.merge**2
        return tokens + (math.isqrt(tokens) if self.row_ends is not None else 0)
