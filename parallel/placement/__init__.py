"""EPLB placement: which slot holds which expert. Planning, replica choice, and moves between placements.

A *logical* expert is one of the model; a *physical* expert is a slot of some rank with a copy of one. Slots are
numbered over all ranks: rank = slot // (slots per rank). Everything here except `replicas` is numpy on the host.

Legend: L layers, E logical experts, P physical experts (slots), G ranks, S recorded passes.
"""
