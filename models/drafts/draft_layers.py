"""Interface of layers that draft from hidden states: MTP layers of a checkpoint, and EAGLE heads.

Legend: T tokens, S rows, D hidden, F width of the target's states, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.attention.sparse_chunks import SharedSelection
from moe_engine.models.layers.decoder import Decoder, Reloadable
from moe_engine.parallel.step_sizes import StepSizes


def embed_next(model: Decoder, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
    """Embeddings [T, D] of the tokens that follow each hidden state; those of image tokens are the tower's rows."""
    embedding, images = model.embedding(input_ids), batch.next_images
    if images is not None:
        embedding.index_copy_(0, images.tokens, images.rows[:, : embedding.shape[1]])
    return embedding


class DraftLayers(Protocol):
    """Drafts in `num_layers` layers, each with its own cache; after the last one, that layer continues."""

    ids: Tensor | None
    """The target's ids [W] int64 of the draft vocabulary, ascending; None: it is the target's vocabulary."""
    weight_bytes: int
    windowed: bool
    """Whether the layers have a window, as layers of the target have."""

    @property
    def num_layers(self) -> int: ...

    @property
    def shares_selection(self) -> bool:
        """As `MTPLayers.shares_selection`."""

    @property
    def fuses_drafts(self) -> bool:
        """As `MTPLayers.fuses_drafts`."""

    @property
    def attends_to_extend(self) -> bool:
        """Whether `remember` runs attention, and needs a planned batch."""

    @property
    def feed_forwards(self) -> list[Any]: ...

    def modules(self) -> Iterator[Reloadable]:
        """Modules that follow a replacement of the target's weights, as `Decoder.modules`."""

    def prepare(self, states: Tensor) -> Tensor:
        """The target's states [T, F] -> hidden states [T, D] of the first draft step; once for each token."""

    def forward(
        self,
        layer: int,
        input_ids: Tensor,
        hidden: Tensor,
        batch: ForwardBatch,
        selection: SharedSelection | None = None,
    ) -> Tensor:
        """One step of one layer, see `MTPLayers.forward`."""

    def join(self, layer: int, batch: ForwardBatch) -> Tensor:
        """Takes part in a step of one layer on other ranks with an empty batch."""

    def remember(self, layer: int, input_ids: Tensor, hidden: Tensor, batch: ForwardBatch) -> None:
        """Only writes the cache of a layer."""

    def logits(self, v: Tensor, sizes: StepSizes | None = None, layer: int = 0) -> Tensor:
        """v [S, D] of a layer -> [S, W] float32."""
