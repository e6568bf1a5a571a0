"""Which slot holds which expert: plans (EPLB), their value, the choice among replicas, and the way from plan to plan.

A *logical* expert is one the model knows; a *physical* expert is a slot of some rank that holds a copy of one. Slots
are numbered through all ranks: rank = slot // (slots a rank). Everything here but `replicas` is numpy on the host.

Legend: L layers, E logical experts, P physical experts (slots), G ranks, S recorded passes.
"""
