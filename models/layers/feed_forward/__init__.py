"""MLPs and mixtures of experts."""
