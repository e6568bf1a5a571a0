"""All-reduce of tensor parallelism: its rows, the choice at launch, and the custom one over symmetric memory."""
