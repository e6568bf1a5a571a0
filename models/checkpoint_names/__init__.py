"""Names of a family's tensors as published, and the model's. Imports no torch."""
