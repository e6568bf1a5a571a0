"""The MTP layer of Qwen3.8-Flash-Next as an oracle: transformers' layer and mixer, with SGLang's formula of their input
(transformers has no MTP for this model)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import sparse
from tests.models.vision_checkpoints import IMAGE, Pixels

BASE = "model.language_model."
_MIXER = "hyper_connection_mixer."


class MTPOracle:
    """transformers' model, and the layer of the MTP as a model of one layer. folder: for the latter's files."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.tensors = load_file(path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        self.model, self._eps = sparse.load(path).model, config["text_config"]["rms_norm_eps"]
        self._layer = sparse.load(self._alone(config, folder)).model
        self.head = self.tensors["lm_head.weight"]

    def _alone(self, config: dict[str, Any], folder: Path) -> Path:
        folder.mkdir()
        config["text_config"] |= {"num_hidden_layers": 1, "layer_types": ["full_attention"], "ple_layer_ids": []}
        (folder / "config.json").write_text(json.dumps(config))
        left_out = f"{BASE}layers.", BASE + _MIXER, "mtp."
        own = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(left_out)}
        for name, tensor in self.tensors.items():
            if name.startswith(("mtp.layers.", f"mtp.{_MIXER}")):
                own[name.replace("mtp.", BASE)] = tensor
        save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    @torch.no_grad()
    def streams(self, ids: list[int], images: Sequence[Pixels] = ()) -> tuple[Tensor, Tensor]:
        """Of a text: all streams [T, n D] after the model's last layer, and the embeddings [T, D]."""
        given: dict[str, Any] = {}
        if images:
            grids = torch.tensor([image.grid for image in images])
            given = {"pixel_values": torch.cat([image.values for image in images]), "image_grid_thw": grids}
            given["mm_token_type_ids"] = (torch.tensor([ids]) == IMAGE).int()
        self.model.rope_deltas = None
        text = self.model.language_model
        found, embedded = list[Tensor](), list[Tensor]()
        with _before(text.hyper_connection_mixer, found.append), _before(text.layers[0], embedded.append):
            self.model(torch.tensor([ids]), **given)
        return found[0][0], embedded[0][0, :, : self.head.shape[1]]

    def axes(self, ids: list[int], images: Sequence[Pixels]) -> Tensor:
        """Positions [3, T] of a text with images."""
        kinds, grids = (torch.tensor([ids]) == IMAGE).int(), torch.tensor([image.grid for image in images])
        found, _ = self.model.get_rope_index(torch.tensor([ids]), mm_token_type_ids=kinds, image_grid_thw=grids)
        return found[:, 0]

    @torch.no_grad()
    def layer(self, embedding: Tensor, streams: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embeddings [T, D] of the next tokens and streams [T, n D] of a text from its start -> the layer's streams,
        and what the head reads [T, D]. positions [3, T]: by axis, if they are not places in the text."""
        normed = self._norm("pre_fc_norm_hidden", streams).unflatten(1, (-1, embedding.shape[1]))
        z = self._norm("pre_fc_norm_embedding", embedding) @ self._weight("fc_embedding").T
        z = (z.unsqueeze(1) + normed @ self._weight("fc_hidden").T).flatten(1)
        found: list[Tensor] = []
        text, given = self._layer.language_model, {} if positions is None else {"position_ids": positions[:, None]}
        with _before(text.hyper_connection_mixer, found.append), _before(text.layers[0], lambda x: z[None]):
            read = text(inputs_embeds=embedding[None], **given).last_hidden_state[0]
        return found[0][0], read

    def embedding(self, ids: list[int]) -> Tensor:
        """[T, D] of text tokens."""
        return self.tensors[f"{BASE}embed_tokens.weight"][ids]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * (1 + self._weight(name))

    def _weight(self, name: str) -> Tensor:
        return self.tensors[f"mtp.{name}.weight"]


@contextmanager
def _before(module: Any, call: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Inside, `call` gets the first argument of the module, and may replace it."""

    def hook(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        new = call(args[0])
        return None if new is None else (new, *args[1:])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
