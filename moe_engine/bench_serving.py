"""``python -m moe_engine.bench_serving --port ...``: same as ``moe-engine bench serving``."""

from __future__ import annotations

import sys

from moe_engine.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serving", *sys.argv[1:]]))
