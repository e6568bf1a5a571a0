"""``python -m moe_engine.launch_server --model-path ... --port ...``: same as ``moe-engine serve``."""

from __future__ import annotations

import sys

from moe_engine.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]], prog="python -m moe_engine.launch_server"))
