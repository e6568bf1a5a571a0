"""A quantized copy of a checkpoint: its tensors and its config.json."""
