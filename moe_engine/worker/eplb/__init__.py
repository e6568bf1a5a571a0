"""Expert placement while serving: recording, rebalancing (EPLB), recovery after a lost rank."""
