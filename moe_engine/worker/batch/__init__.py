"""The batch of one step: request rows, token buffers, block tables, attention metadata."""
