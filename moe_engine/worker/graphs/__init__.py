"""CUDA graphs of decode steps, and regions compiled by torch.compile."""
