"""``python -m moe_engine COMMAND``: the same as ``moe-engine COMMAND``, where the script is not on the PATH."""

import sys

from moe_engine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
