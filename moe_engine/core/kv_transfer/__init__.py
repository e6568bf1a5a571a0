"""Transfers of KV between prefill and decode servers: a thread beside the core's loop. docs/disaggregation.md."""
