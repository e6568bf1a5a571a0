"""Engine core, one per scheduler: its loop, its messages to the frontend, DP attention step sync."""
