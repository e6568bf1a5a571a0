"""Speculation as part of a step: draft, verify with everything else the step computes, accept, and follow."""
