"""From logits to tokens: penalties, logits processors, log-probabilities, the sampler."""
