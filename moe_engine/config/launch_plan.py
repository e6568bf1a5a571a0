"""From what was asked to what will run: finds the checkpoint, reads config.json, looks at the machine, resolves.

Imports no torch on a CPU, so that a launch which cannot work is refused in well under a second.
"""

from __future__ import annotations

import json
import secrets

from moe_engine.config.args import EngineArgs
from moe_engine.config.checkpoint import inspect, locate
from moe_engine.config.machine import Machine, probe_machine
from moe_engine.config.resolve import ResolvedConfig, resolve
from moe_engine.errors import ConfigError
from moe_engine.kernels.backends import choose
from moe_engine.kernels.device import Device, Need, cpu_device
from moe_engine.kernels.registry import Choice
from moe_engine.models.config import load_model_config

SEED_BITS = 30
FLAGS = {
    "attention": "--attention-backend",
    "experts": "--moe-runner-backend",
    "linear": "--linear-backend",
    "ops": "--ops-backend",
}
"""The flag that names a kernel family's backend."""


def prepare(args: EngineArgs, machine: Machine | None = None) -> ResolvedConfig:
    """Does the reading that `resolve` must not do, then resolves. Call it once, in the process that starts the engine.

    Raises:
        ConfigError: as `resolve`; or no such checkpoint, an unsupported model, missing or truncated weight files, or a
            backend that was asked for and cannot run here.
    """
    folder = locate(args.model.model_path, args.model.revision, args.model.download_dir)
    model = load_model_config(folder, json.loads(args.model.json_model_override_args))
    found = machine or probe_machine(args.model.device)
    config_folder = folder if folder.is_dir() else folder.parent
    dummy = args.model.load_format == "dummy"
    checkpoint = None if dummy else inspect(config_folder, model.num_layers)
    resolved = resolve(
        args,
        model,
        found,
        model_path=str(config_folder),
        checkpoint=checkpoint,
        drawn_seed=secrets.randbits(SEED_BITS),
    )
    if checkpoint is None and not dummy:
        raise ConfigError(
            f"{config_folder}: no *.safetensors files beside config.json; give the folder of a complete checkpoint, or "
            "use --load-format dummy for random weights"
        )
    if resolved.device == "cpu":
        choose_backends(resolved, cpu_device())
    return resolved


def need_of(config: ResolvedConfig) -> Need:
    """What the model and the launch ask of a kernel backend."""
    model = config.model
    dims = {"hidden": model.hidden_size, "heads": model.attention.num_heads}
    return Need(config.dtype, config.kv_cache_dtype, model.attention.kind, config.page_size, tuple(dims.items()))


def choose_backends(config: ResolvedConfig, device: Device) -> tuple[Choice, ...]:
    """The row of each kernel family, with reasons and refusals; imports no backend and no torch.

    Raises:
        ConfigError: a backend that was asked for cannot run here; names the flag and the reason.
    """
    need, asked = need_of(config), config.asked_backends
    try:
        return choose(device, need, asked)
    except ValueError as error:
        flags = ", ".join(f"{FLAGS[family]} {name}" for family, name in asked.items() if name != "auto")
        raise ConfigError(f"{flags or 'kernels'}: {error}") from None
