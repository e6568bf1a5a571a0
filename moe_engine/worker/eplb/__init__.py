"""Expert placement while serving: expert recording, EPLB, recovery after the loss of ranks."""
