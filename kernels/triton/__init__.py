"""What the Triton kernels of all families share: compilation ahead of time, the guard, the list of modules."""
