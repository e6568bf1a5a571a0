"""Engine core, one per scheduler: its loop, its messages to the front end, DP attention step sync."""
