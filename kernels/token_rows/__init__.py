"""Rows of tokens on the host: between the messages of ranks and the batches of experts."""
