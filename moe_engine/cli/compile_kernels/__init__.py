"""``moe-engine compile``: the Triton kernels of a launch, compiled for a GPU that need not be here."""
