"""``moe-engine cluster-check``: whether the nodes of a job can serve a model together, before any GPU time is spent.

One process a node: each reports what it is (`facts`), tries the links to all others (`links`) and then runs its part of
a small engine that spans all nodes (`engine_trial`). Node 0 leads (`leader`), the others follow (`follower`).
"""
