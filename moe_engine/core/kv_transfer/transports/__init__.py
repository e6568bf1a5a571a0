"""How bytes of KV reach another server: one protocol, a file for each row of `table.py`."""
