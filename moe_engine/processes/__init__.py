"""Child processes, their runtime directory and threads, and the sockets between them."""
