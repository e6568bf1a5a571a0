"""Low-rank adapters (LoRA): several in one batch, beside the products of the base model."""
