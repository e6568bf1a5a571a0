"""Frontend of the server and the offline API: request checks, tokenization, client of the engine cores, DP routing."""
