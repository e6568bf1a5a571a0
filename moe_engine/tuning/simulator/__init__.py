"""Simulation of a deployment: the production scheduler on a simulated clock.

`workload` (arrivals) -> `fleet` (routing, replicas in order of time) -> `replica` (steps in lockstep) -> `group` (one
scheduler) -> `moe_engine.scheduler`; `costs` has the seconds of a step, `recorder` the clients' measurements.
"""
