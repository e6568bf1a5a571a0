"""Low-rank adapters (LoRA): several in one batch, added to the products of the base model."""
