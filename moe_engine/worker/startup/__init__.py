"""Startup before READY: the choice of kernels, drafter, expert placement, the warm-up, CUDA graphs, torch.compile."""
