"""Weights while the engine serves: updates from files, tensors and trainers, reads, the release of their memory."""
