"""moe-engine: an inference engine for DeepSeek-style mixture-of-experts models.

`Engine` is the offline API, `ServerArgs` its flags as one object, `moe-engine serve` the server; `register_model` adds
a custom model class.
Importing the package imports neither torch nor the engine: names are imported on first use.
"""

from __future__ import annotations

import atexit
import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_engine.frontend.engine import Engine
    from moe_engine.models.registry import register as register_model
    from moe_engine.server_args import ServerArgs

# At exit the last collection would free msgspec's type information while it is still referred to, and end a program
# whose work is done with SIGSEGV (github.com/msgspec/msgspec/issues/717). It leaves out frozen objects.
atexit.register(gc.freeze)

__version__ = "0.1.0"
__all__ = ["Engine", "ServerArgs", "__version__", "register_model"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from moe_engine.frontend.engine import Engine

        return Engine
    if name == "ServerArgs":
        from moe_engine.server_args import ServerArgs

        return ServerArgs
    if name == "register_model":
        from moe_engine.models.registry import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
