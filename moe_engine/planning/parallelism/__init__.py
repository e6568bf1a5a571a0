"""Ranks, nodes, dispatcher and expert placement of a launch."""
