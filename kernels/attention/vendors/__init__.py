"""Attention of vendor libraries: FlashMLA, FlashInfer, FlashAttention 3."""
