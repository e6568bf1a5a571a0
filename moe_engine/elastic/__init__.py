"""Elastic EP (``--elastic-ep``): the engine continues without lost ranks. `policy` is the entry point."""
