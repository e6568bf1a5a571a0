"""Report of recorded expert counts as tables and plots: ``moe-engine experts DUMP``.

Legend: S passes, L layers, E experts.
"""
