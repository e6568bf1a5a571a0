"""Child processes, runtime directory, monitored threads, ZeroMQ sockets between processes."""
