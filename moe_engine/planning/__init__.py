"""From flags, model and machine to one frozen configuration with a reason for each choice. Imports no torch."""
