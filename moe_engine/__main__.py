"""``python -m moe_engine COMMAND``: same as ``moe-engine COMMAND``, for when the script is not on the PATH."""

import sys

from moe_engine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
