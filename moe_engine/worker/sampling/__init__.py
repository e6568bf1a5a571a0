"""Sampling: penalties, logits processors, log-probabilities, the sampler."""
