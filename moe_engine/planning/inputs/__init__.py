"""What a launch finds: the machine, GPUs by name, the cluster launch, the checkpoint's files."""
