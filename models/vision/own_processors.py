"""Image processors of this project, for models whose processor in transformers needs torch or has another result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_engine.models.checkpoint_names.mistral_native import native_fields, native_file
from moe_engine.models.config_sections.fields import read_json
from moe_engine.models.vision.cohere2_pixels import Cohere2Processor
from moe_engine.models.vision.deepseek_v41_pixels import DeepseekV41Processor
from moe_engine.models.vision.gemma3_pixels import Gemma3Processor
from moe_engine.models.vision.glm_pixels import Glm4vProcessor, GlmProcessor
from moe_engine.models.vision.kimi_pixels import KimiProcessor
from moe_engine.models.vision.llama4_pixels import Llama4Processor
from moe_engine.models.vision.minimax_pixels import qwen_fields
from moe_engine.models.vision.pixtral_pixels import PixtralProcessor

OwnProcessor = (
    Cohere2Processor
    | DeepseekV41Processor
    | Gemma3Processor
    | Glm4vProcessor
    | GlmProcessor
    | KimiProcessor
    | Llama4Processor
    | PixtralProcessor
)

PROCESSOR_FILE = "preprocessor_config.json"
_WHOLE_FILE = "processor_config.json"


def processor_fields(folder: Path) -> Mapping[str, Any]:
    """The image processor's settings: a file of their own, or a part of the processor's; empty: there are none. Those
    of MiniMax-M3 are `qwen_settings`.

    Raises:
        ConfigError: a file that is not readable.
    """
    return qwen_settings(folder) or _stored_fields(folder)


def qwen_settings(folder: Path) -> dict[str, Any] | None:
    """Arguments of transformers' processor of Qwen2-VL for a model whose processor computes the same; None: another
    processor. Raises ConfigError for settings that are not served, and as `processor_fields`."""
    return qwen_fields(_stored_fields(folder), str(folder / PROCESSOR_FILE))


def _stored_fields(folder: Path) -> Mapping[str, Any]:
    if (file := folder / PROCESSOR_FILE).is_file():
        found: Mapping[str, Any] = read_json(file)
        return found
    part = read_json(file).get("image_processor") if (file := folder / _WHOLE_FILE).is_file() else None
    return part if isinstance(part, Mapping) else {}


def own_processor(folder: Path) -> OwnProcessor | None:
    """The processor of a checkpoint's folder; None: it is not one of this project's. Raises as `processor_fields`."""
    fields = processor_fields(folder)
    if (native := native_file(folder)) is not None:
        return PixtralProcessor.native(native_fields(native))
    if (found := KimiProcessor.of(fields) or GlmProcessor.of(fields) or Glm4vProcessor.of(fields)) is not None:
        return found
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    makers = (
        DeepseekV41Processor.of, Llama4Processor.of, Cohere2Processor.of, Gemma3Processor.of, PixtralProcessor.of
    )  # fmt: skip
    return next((own for of in makers if (own := of(fields, config)) is not None), None)
