"""Transfers of KV between prefill and decode servers: a thread of its own. docs/disaggregation.md."""
