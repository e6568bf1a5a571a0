"""What recorded expert counts say, as tables, pictures and a live page: ``moe-engine experts DUMP``.

Legend: S passes, L layers, E experts.
"""
