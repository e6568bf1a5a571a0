"""One scheduler's process: the loop, its messages to the front end, the step agreement between DP ranks."""
