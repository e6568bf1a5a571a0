"""Attention in Triton: MLA over the paged latent, expanded prefill, GQA over pages."""
