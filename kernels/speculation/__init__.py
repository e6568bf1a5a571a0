"""Bookkeeping of drafted chains on the device: inputs of a step from the rows' own lengths, acceptance."""
