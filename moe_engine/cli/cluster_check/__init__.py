"""``moe-engine cluster-check``: checks that the nodes of a job can serve a model together, before using GPU time.

One process per node: each reports its facts (`facts`), tests the links to all others (`links`) and then runs its part
of a small engine that spans all nodes (`engine_trial`). Node 0 leads (`leader`), the others follow (`follower`).
"""
