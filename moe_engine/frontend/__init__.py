"""The server's and the offline API's side: request checks, tokenisation, the client of the cores, DP routing."""
