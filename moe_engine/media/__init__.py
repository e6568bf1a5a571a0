"""Images of requests: read from where a request names them, processed in child processes, placed in the prompt."""
