"""``moe-engine cluster-check``: checks that the nodes of a job can serve a model together, before using GPU time.

One process per node runs the steps in `command`: its facts (`facts`), the links to all others (`links`), its part of a
small engine that spans all nodes (`engine_trial`). Node 0 gathers the results (`exchange`) and reports (`report`).
"""
