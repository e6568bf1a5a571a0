"""Child process of test_frame_child.py: answers a frame after it has slept, or computes without end."""

import sys
import time

from moe_engine.processes.pipe_frames import read_frame, write_frame

while True:
    wish = read_frame(sys.stdin.buffer)
    if wish == b"sleep":
        time.sleep(0.5)
    while wish == b"compute":
        pass
    write_frame(sys.stdout.buffer, wish)
