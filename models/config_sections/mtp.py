"""How the MTP layers of a model differ from DeepSeek V3's. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MTPForm:
    """
    Attributes:
        like: the model's layer whose attention, window and rotary embedding MTP layers have; None: they attend to all
            positions, as layers without a window do.
        dense: they have an MLP in a model with experts (ERNIE 4.5, LongCat-Flash, Step 3.5).
        own_heads: each has an LM head of its own (Step 3.5).
        reads_residual: they read the residual before the model's final norm, and pass on their own before theirs
            (Step 3.5, MiMo-7B).
        hidden_first: their projection reads the normed hidden state before the normed embedding (MiMo-7B).
    """

    like: int | None = None
    dense: bool = False
    own_heads: bool = False
    reads_residual: bool = False
    hidden_first: bool = False


DEEPSEEK = MTPForm()
