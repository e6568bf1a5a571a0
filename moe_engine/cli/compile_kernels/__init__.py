"""``moe-engine compile``: ahead-of-time compilation of a launch's Triton kernels; needs no GPU."""
