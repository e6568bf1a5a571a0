"""Identity of a launch's weights, for comparison with another node or server."""

from __future__ import annotations

from moe_engine.errors import ConfigError
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.storage.fingerprint import fingerprint_of


def weights_identity(config: ResolvedConfig) -> str:
    """Equal for equal checkpoints, wherever their files are: `fingerprint_of`. With MTP layers of another checkpoint or
    an EAGLE head its fingerprint too, because their KV is computed with them.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    if config.args.model.load_format == "dummy":
        return "dummy"
    speculation = config.speculation
    drafts = speculation.draft_model_path if speculation is not None and speculation.follows else None
    try:
        return " ".join(fingerprint_of(path) for path in (config.model_path, drafts) if path)
    except OSError as error:
        raise ConfigError(f"{config.model_path}: the checkpoint cannot be read: {error}") from error
