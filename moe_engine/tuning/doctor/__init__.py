"""Reads logs and live servers, evaluates the rules of the tuning guides, and names the flag to change."""
