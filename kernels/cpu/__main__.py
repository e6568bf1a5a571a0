"""``python -m moe_engine.kernels.cpu``: compiles the C++ kernels now, so that engine startup does not wait for the
compiler.

Without a compiler it prints this and exits successfully: the torch rows are then used.
"""

from __future__ import annotations

import logging

from moe_engine.kernels.cpu.library import LibraryError, load


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        library = load()
    except LibraryError as error:
        print(f"CPU kernels: not built ({error}); the torch kernels will serve, more slowly")
    else:
        print(f"CPU kernels: {library.path}, {library.file}")


if __name__ == "__main__":
    main()
