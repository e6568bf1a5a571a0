"""KV slots of requests: the radix cache over them, allocation, and the models with windows or with states."""
