"""Weight formats: how checkpoints store a matrix, and the form in which kernels multiply it."""
