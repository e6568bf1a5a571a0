"""DSpark's Markov head: a bias of the logits of a draft by the draft before it.

Legend: S rows, D hidden, V vocabulary, W draft vocabulary, R rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.models.config_sections.block import MARKOV, BlockConfig
from moe_engine.models.weights import WeightSource


class MarkovHead:
    """bias = w2(f(w1[token before])). ``vanilla``: f is the identity; ``gated``: a product with a gate that reads the
    output of the block too; ``rnn``: a recurrent cell along the block.

    Every rank has all weights: the drafts of a block follow each other, and each needs the whole bias.

    Args:
        draft_vocab: W; 0: V.
    """

    def __init__(
        self,
        block: BlockConfig,
        reader: WeightSource,
        hidden: int,
        vocab_size: int,
        prefix: str = MARKOV,
        draft_vocab: int = 0,
    ) -> None:
        self._rank, self._kind = rank, kind = block.markov_rank, block.markov_head
        self._embedding = reader.tensor(f"{prefix}.markov_w1.weight", (vocab_size, rank))
        self._project = reader.tensor(f"{prefix}.markov_w2.weight", (draft_vocab or vocab_size, rank))
        self._gate: tuple[Tensor, Tensor] | None = None
        if kind != "vanilla":
            name, rows, columns = (
                ("gate_proj", rank, hidden + rank) if kind == "gated" else ("joint_proj", 3 * rank, 2 * rank + hidden)
            )
            self._gate = (
                reader.tensor(f"{prefix}.{name}.weight", (rows, columns)),
                reader.tensor(f"{prefix}.{name}.bias", (rows,)),
            )

    def first_state(self, count: int) -> Tensor:
        """State [S, R] at the start of blocks."""
        return self._embedding.new_zeros(count, self._rank)

    def bias(self, tokens: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The bias [S, W] float32 of the next draft, and the next state.

        Args:
            tokens: [S] int64, the token before.
            v: [S, D], the block's output for the draft.
        """
        latent = F.embedding(tokens, self._embedding)
        if self._gate is not None and self._kind == "gated":
            latent = torch.sigmoid(F.linear(torch.cat((v, latent), 1), *self._gate)) * latent
        elif self._gate is not None:
            gate, candidate, out = F.linear(torch.cat((state, latent, v), 1), *self._gate).chunk(3, 1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            latent = torch.tanh(out)
        return F.linear(latent, self._project).float(), state
