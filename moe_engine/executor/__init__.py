"""The ranks behind one core: process groups, plan broadcast, the worker that drives them."""
