"""Permute and unpermute: sort tokens by expert, gather, weighted sum."""
