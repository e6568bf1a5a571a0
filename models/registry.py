"""Model registry: architecture name to model class. Model classes are imported lazily; this file imports no torch.

An external model is registered either in Python before the launch::

    from moe_engine.models import register
    register("MyForCausalLM", "my_package.model:MyModel", config_parser="my_package.model:parse")

or by an entry point of the group ``moe_engine.models``: either a function to call once (it calls `register`), or the
model class, with the architecture as entry point name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.fields import Fields

logger = logging.getLogger(__name__)

ConfigParser = Callable[[Fields, Mapping[str, Any]], ModelConfig]
ENTRY_POINT_GROUP = "moe_engine.models"

_FAMILIES = "moe_engine.models.config_parsers.families"
_OTHER_DENSE = "moe_engine.models.config_parsers.dense"
_GRANITE = "moe_engine.models.config_parsers.granite"
_MIXTURES = "moe_engine.models.config_parsers.mixtures"
_WINDOWED = "moe_engine.models.config_parsers.windowed"
_COHERE = "moe_engine.models.config_parsers.cohere:parse_cohere2"
_DEEPSEEK = "moe_engine.models.families.deepseek:DeepseekModel"
_DENSE = "moe_engine.models.families.dense:DenseModel"
_IMAGE_TEXT = "moe_engine.models.families.image_text:ImageTextModel"
_PIXTRAL = "moe_engine.models.families.mistral3:Mistral3Model"
_MISTRAL3 = "moe_engine.models.families.mistral3:make_model"
_LARGE4 = "moe_engine.models.config_parsers.mistral_large4"
_DEEPSEEK_V4 = "moe_engine.models.families.deepseek_v4:DeepseekV4Model"
_DEEPSEEK_V41 = "moe_engine.models.families.deepseek_v41:DeepseekV41Model"
_GLM5_NEXT = "moe_engine.models.families.glm5_next:Glm5NextModel"
_GEMMA3 = "moe_engine.models.families.gemma3:Gemma3Model"
_KIMI = "moe_engine.models.families.kimi:KimiModel"
_LING = "moe_engine.models.families.ling:LingModel"
_KIMI_LINEAR = "moe_engine.models.families.kimi_linear:KimiLinearModel"
_KIMI_K3 = "moe_engine.models.families.kimi_linear:KimiK3Model"
_LFM2 = "moe_engine.models.families.lfm2:Lfm2Model"
_LONGCAT = "moe_engine.models.families.longcat_flash:LongcatFlashModel"
_MINIMAX_M3 = "moe_engine.models.families.minimax_m3:MiniMaxM3Model"
_PARSE_MINIMAX_M3 = "moe_engine.models.config_parsers.minimax_m3:parse_minimax_m3"
_MINIMAX_TEXT = "moe_engine.models.families.minimax_text:MiniMaxTextModel"
_NEMOTRON_H = "moe_engine.models.families.nemotron_h:NemotronHModel"
_QWEN3_NEXT = "moe_engine.models.families.qwen3_next:Qwen3NextModel"
_QWEN3_5 = "moe_engine.models.families.qwen3_5:Qwen35Model"
_GATED_HEADS = "moe_engine.models.families.gated_heads:GatedHeadsModel"
_QWEN4_EXP = "moe_engine.models.families.qwen4_exp:Qwen4ExpModel"


@dataclass(frozen=True)
class Architecture:
    """A model class and the parser of its config.json; each an object or a dotted path ``module:name``."""

    name: str
    target: str | Callable[..., Any]
    config_parser: str | ConfigParser

    def parse(self, fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
        """config.json's fields and generation_config.json's object -> ModelConfig. Raises ConfigError."""
        return _resolve(self.config_parser)(fields, generation)

    def model_class(self) -> Callable[..., Any]:
        """Imports the model's module."""
        return _resolve(self.target)


def _resolve(target: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


_architectures: dict[str, Architecture] = {}
_entry_points_loaded = False


def register(
    architecture: str, target: str | Callable[..., Any], config_parser: str | ConfigParser | None = None
) -> None:
    """Adds or replaces an architecture.

    Args:
        architecture: the name in config.json's `architectures`.
        target: the model class or its dotted path, called as `target(config, reader, backends, parallel,
            max_positions=...)` (positions that requests can reach; interface: `models.batch.Model`).
        config_parser: (fields, generation defaults) -> ModelConfig; default: MLA if its fields are present, else dense.
    """
    parser = config_parser or f"{_FAMILIES}:parse_auto"
    _architectures[architecture] = Architecture(architecture, target, parser)


for _name, _target, _parser in (
    ("DeepseekV2ForCausalLM", _DEEPSEEK, "parse_deepseek"),
    ("DeepseekV3ForCausalLM", _DEEPSEEK, "parse_deepseek"),
    ("DeepseekV32ForCausalLM", _DEEPSEEK, "parse_sparse_deepseek"),
    ("DeepseekV4ForCausalLM", _DEEPSEEK_V4, "moe_engine.models.config_parsers.compressed:parse_deepseek_v4"),
    ("DeepseekV41ForCausalLM", _DEEPSEEK_V41, "moe_engine.models.config_parsers.shared_entries:parse_deepseek_v41"),
    ("GlmMoeDsaForCausalLM", _DEEPSEEK, "parse_sparse_deepseek"),
    ("Glm5NextForConditionalGeneration", _GLM5_NEXT, "moe_engine.models.config_parsers.glm5_next:parse_glm5_next"),
    ("Glm4MoeLiteForCausalLM", _DEEPSEEK, "parse_deepseek"),
    ("YoutuForCausalLM", _DEEPSEEK, "parse_deepseek"),
    ("AXK1ForCausalLM", _DEEPSEEK, "parse_axk1"),
    ("KimiK25ForConditionalGeneration", _KIMI, "moe_engine.models.config_parsers.kimi:parse_kimi_k25"),
    ("Kimi_K25ForConditionalGeneration", _KIMI, "moe_engine.models.config_parsers.kimi:parse_kimi_k25"),
    ("KimiLinearForCausalLM", _KIMI_LINEAR, "moe_engine.models.config_parsers.kimi_linear:parse_kimi_linear"),
    ("KimiK3ForConditionalGeneration", _KIMI_K3, "moe_engine.models.config_parsers.kimi_linear:parse_kimi_linear"),
    ("BailingMoeV2ForCausalLM", _DENSE, "moe_engine.models.config_parsers.bailing:parse_bailing_v2"),
    ("BailingMoeV3ForCausalLM", _LING, "moe_engine.models.config_parsers.bailing:parse_bailing_hybrid"),
    ("BailingHybridForCausalLM", _LING, "moe_engine.models.config_parsers.bailing:parse_bailing_hybrid"),
    ("BailingMoeV2_5ForCausalLM", _LING, "moe_engine.models.config_parsers.bailing:parse_bailing_v2_5"),
    ("Lfm2ForCausalLM", _LFM2, "moe_engine.models.config_parsers.lfm2:parse_lfm2"),
    ("Lfm2MoeForCausalLM", _LFM2, "moe_engine.models.config_parsers.lfm2:parse_lfm2_moe"),
    ("LongcatFlashForCausalLM", _LONGCAT, "moe_engine.models.config_parsers.longcat:parse_longcat_flash"),
    ("Cohere2ForCausalLM", _DENSE, _COHERE),
    ("Cohere2MoeForCausalLM", _DENSE, _COHERE),
    ("Cohere2VisionForConditionalGeneration", _IMAGE_TEXT, f"{_COHERE}_vision"),
    ("LlamaForCausalLM", _DENSE, "parse_dense"),
    ("Llama4ForConditionalGeneration", _IMAGE_TEXT, "moe_engine.models.config_parsers.llama4:parse_llama4"),
    ("Llama4ForCausalLM", _DENSE, "moe_engine.models.config_parsers.llama4:parse_llama4"),
    ("MistralForCausalLM", _DENSE, "parse_dense"),
    ("Phi3ForCausalLM", _DENSE, "parse_phi3"),
    ("MinistralForCausalLM", _DENSE, "parse_dense"),
    ("Olmo2ForCausalLM", _DENSE, f"{_OTHER_DENSE}:parse_olmo2"),
    ("Olmo3ForCausalLM", _DENSE, f"{_OTHER_DENSE}:parse_olmo3"),
    ("SmolLM3ForCausalLM", _DENSE, f"{_OTHER_DENSE}:parse_smollm3"),
    ("Exaone4ForCausalLM", _DENSE, f"{_OTHER_DENSE}:parse_exaone4"),
    ("GraniteForCausalLM", _DENSE, f"{_GRANITE}:parse_granite"),
    ("GraniteMoeForCausalLM", _DENSE, f"{_GRANITE}:parse_granite_moe"),
    ("GraniteMoeHybridForCausalLM", _NEMOTRON_H, f"{_GRANITE}:parse_granite_hybrid"),
    ("GraniteMoeSharedForCausalLM", _DENSE, f"{_GRANITE}:parse_granite_moe"),
    ("GraniteSWAForCausalLM", _DENSE, f"{_GRANITE}:parse_granite_swa"),
    ("GraniteMoeSWAForCausalLM", _DENSE, f"{_GRANITE}:parse_granite_swa"),
    ("GlmForCausalLM", _DENSE, "parse_glm"),
    ("Glm4ForCausalLM", _DENSE, "parse_glm"),
    ("OlmoeForCausalLM", _DENSE, f"{_MIXTURES}:parse_olmoe"),
    ("FlexOlmoForCausalLM", _DENSE, f"{_MIXTURES}:parse_flex_olmo"),
    ("ExaoneMoEForCausalLM", _DENSE, f"{_WINDOWED}:parse_exaone_moe"),
    ("ExaoneMoeForCausalLM", _DENSE, f"{_WINDOWED}:parse_exaone_moe"),
    ("FlintForCausalLM", _DENSE, f"{_WINDOWED}:parse_flint"),
    ("MellumForCausalLM", _DENSE, f"{_WINDOWED}:parse_mellum"),
    ("SeedOssForCausalLM", _DENSE, "parse_seed_oss"),
    ("Gemma4ForCausalLM", _DENSE, "moe_engine.models.config_parsers.gemma:parse_gemma4"),
    ("Gemma4ForConditionalGeneration", _DENSE, "moe_engine.models.config_parsers.gemma:parse_gemma4"),
    ("Gemma2ForCausalLM", _DENSE, "moe_engine.models.config_parsers.gemma:parse_gemma2"),
    ("Gemma3ForCausalLM", _DENSE, "moe_engine.models.config_parsers.gemma:parse_gemma3"),
    ("Gemma3ForConditionalGeneration", _GEMMA3, "moe_engine.models.config_parsers.gemma:parse_gemma3_vision"),
    ("PhiMoEForCausalLM", _DENSE, f"{_MIXTURES}:parse_phi_moe"),
    ("PhimoeForCausalLM", _DENSE, f"{_MIXTURES}:parse_phi_moe"),
    ("Qwen2ForCausalLM", _DENSE, "parse_dense"),
    ("Qwen3ForCausalLM", _DENSE, "parse_dense"),
    ("Qwen2MoeForCausalLM", _DENSE, "parse_qwen2_moe"),
    ("Qwen3MoeForCausalLM", _DENSE, "parse_qwen3_moe"),
    ("MixtralForCausalLM", _DENSE, "parse_mixtral"),
    ("Glm4MoeForCausalLM", _DENSE, f"{_MIXTURES}:parse_glm4_moe"),
    ("GptOssForCausalLM", _DENSE, f"{_MIXTURES}:parse_gpt_oss"),
    ("MiniMaxM2ForCausalLM", _DENSE, f"{_MIXTURES}:parse_minimax_m2"),
    *(
        (f"MiniMax{name}ForCausalLM", _MINIMAX_TEXT, "moe_engine.models.config_parsers.minimax_text:parse_minimax_text")
        for name in ("", "Text01", "M1")
    ),
    (
        "MiniMaxM3SparseForConditionalGeneration",
        _MINIMAX_M3,
        _PARSE_MINIMAX_M3,
    ),
    ("MiniMaxM3SparseForCausalLM", _MINIMAX_M3, _PARSE_MINIMAX_M3),
    ("MiMoForCausalLM", _DENSE, "moe_engine.models.config_parsers.mimo:parse_mimo"),
    ("MiMoV2ForCausalLM", _DENSE, "moe_engine.models.config_parsers.mimo:parse_mimo_v2_flash"),
    ("MiMoV2FlashForCausalLM", _DENSE, "moe_engine.models.config_parsers.mimo:parse_mimo_v2_flash"),
    ("Step3p5ForCausalLM", _GATED_HEADS, "moe_engine.models.config_parsers.step:parse_step"),
    ("Step3p7ForConditionalGeneration", _GATED_HEADS, "moe_engine.models.config_parsers.step:parse_step"),
    ("AfmoeForCausalLM", _GATED_HEADS, "moe_engine.models.config_parsers.afmoe:parse_afmoe"),
    ("LagunaForCausalLM", _GATED_HEADS, "moe_engine.models.config_parsers.laguna:parse_laguna"),
    ("Dots1ForCausalLM", _DENSE, f"{_MIXTURES}:parse_dots1"),
    ("SolarOpenForCausalLM", _DENSE, f"{_MIXTURES}:parse_solar_open"),
    ("Ernie4_5ForCausalLM", _DENSE, f"{_MIXTURES}:parse_ernie"),
    ("Ernie4_5_MoeForCausalLM", _DENSE, f"{_MIXTURES}:parse_ernie_moe"),
    ("HunYuanDenseV1ForCausalLM", _DENSE, "moe_engine.models.config_parsers.hunyuan:parse_hunyuan"),
    ("HunYuanMoEV1ForCausalLM", _DENSE, "moe_engine.models.config_parsers.hunyuan:parse_hunyuan_moe"),
    ("HYV3ForCausalLM", _DENSE, "moe_engine.models.config_parsers.hunyuan:parse_hy_v3"),
    ("Ministral3ForCausalLM", _DENSE, "moe_engine.models.config_parsers.mistral:parse_ministral3"),
    ("Mistral4ForCausalLM", _DEEPSEEK, "moe_engine.models.config_parsers.mistral:parse_mistral4"),
    ("MistralLarge3ForCausalLM", _DEEPSEEK, "moe_engine.models.config_parsers.mistral:parse_mistral_large3"),
    ("PixtralForConditionalGeneration", _MISTRAL3, "moe_engine.models.config_parsers.mistral:parse_native_pixtral"),
    ("LlavaForConditionalGeneration", _PIXTRAL, "moe_engine.models.config_parsers.mistral:parse_llava"),
    ("MistralLarge4ForConditionalGeneration", _MISTRAL3, f"{_LARGE4}:parse_mistral_large4"),
    ("Mistral3ForConditionalGeneration", _MISTRAL3, "moe_engine.models.config_parsers.mistral:parse_mistral3"),
    ("Qwen2VLForConditionalGeneration", _IMAGE_TEXT, "moe_engine.models.config_parsers.vision:parse_qwen2_vl"),
    ("Qwen2_5_VLForConditionalGeneration", _IMAGE_TEXT, "moe_engine.models.config_parsers.vision:parse_qwen2_5_vl"),
    ("Qwen3VLForConditionalGeneration", _IMAGE_TEXT, "moe_engine.models.config_parsers.vision:parse_qwen3_vl"),
    ("Qwen3VLMoeForConditionalGeneration", _IMAGE_TEXT, "moe_engine.models.config_parsers.vision:parse_qwen3_vl_moe"),
    ("Glm4vForConditionalGeneration", _IMAGE_TEXT, "moe_engine.models.config_parsers.vision:parse_glm4v"),
    ("Glm46VForConditionalGeneration", _IMAGE_TEXT, "moe_engine.models.config_parsers.vision:parse_glm4v"),
    ("Glm4vMoeForConditionalGeneration", _IMAGE_TEXT, "moe_engine.models.config_parsers.vision:parse_glm4v_moe"),
    ("NemotronHForCausalLM", _NEMOTRON_H, "moe_engine.models.config_parsers.nemotron_h:parse_nemotron_h"),
    ("Qwen3NextForCausalLM", _QWEN3_NEXT, "moe_engine.models.config_parsers.hybrid:parse_qwen3_next"),
    ("Qwen3_5ForConditionalGeneration", _QWEN3_5, "moe_engine.models.config_parsers.hybrid:parse_qwen3_5"),
    ("Qwen3_5MoeForConditionalGeneration", _QWEN3_5, "moe_engine.models.config_parsers.hybrid:parse_qwen3_5_moe"),
    ("Qwen3_5ForCausalLM", _QWEN3_NEXT, "moe_engine.models.config_parsers.hybrid:parse_qwen3_5"),
    ("Qwen3_5MoeForCausalLM", _QWEN3_NEXT, "moe_engine.models.config_parsers.hybrid:parse_qwen3_5_moe"),
    ("Qwen4ExpForConditionalGeneration", _QWEN4_EXP, "moe_engine.models.config_parsers.qwen4_exp:parse_qwen4_exp"),
    ("Qwen4ExpForCausalLM", _QWEN4_EXP, "moe_engine.models.config_parsers.qwen4_exp:parse_qwen4_exp"),
    ("LlamaForSequenceClassification", _DENSE, "parse_dense"),
    ("Qwen2ForSequenceClassification", _DENSE, "parse_dense"),
    ("Qwen3ForSequenceClassification", _DENSE, "parse_dense"),
    ("Qwen2ForRewardModel", _DENSE, "parse_dense"),
    ("LlamaModel", _DENSE, "parse_dense"),
    ("MistralModel", _DENSE, "parse_dense"),
    ("Qwen2Model", _DENSE, "parse_dense"),
    ("Qwen3Model", _DENSE, "parse_dense"),
):
    register(_name, _target, _parser if ":" in _parser else f"{_FAMILIES}:{_parser}")
_BUILT_IN = dict(_architectures)

_BY_MODEL_TYPE = {
    "bailing_hybrid": "BailingHybridForCausalLM",
    "bailing_moe_v2": "BailingMoeV2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "deepseek_v41": "DeepseekV41ForCausalLM",
    "deepseek_v41_text": "DeepseekV41ForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "glm5_next_text": "Glm5NextForConditionalGeneration",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "youtu": "YoutuForCausalLM",
    "axk1": "AXK1ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "kimi_k3": "KimiK3ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "cohere2_vision": "Cohere2VisionForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "llama4_text": "Llama4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "longcat_flash": "LongcatFlashForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "flint": "FlintForCausalLM",
    "mellum": "MellumForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm4v_text": "Glm4vForConditionalGeneration",
    "glm46v": "Glm46VForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "glm4v_moe_text": "Glm4vMoeForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "minimax_text_01": "MiniMaxText01ForCausalLM",
    "minimax_m1": "MiniMaxM1ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "mimo": "MiMoForCausalLM",
    "mimo_v2": "MiMoV2ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "laguna": "LagunaForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
    "step3p7": "Step3p7ForConditionalGeneration",
    "dots1": "Dots1ForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
    "mistral_large4_text": "MistralLarge4ForConditionalGeneration",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}


def supported() -> list[str]:
    """Names of all architectures, external ones included."""
    _load_entry_points()
    return sorted(_architectures)


def is_built_in(architecture: str) -> bool:
    """True for built-in class and parser, with the tensor names of `tensors.model_tensors`."""
    return architecture in _BUILT_IN and _architectures[architecture] == _BUILT_IN[architecture]


def find(names: list[str], model_type: str | None = None, source: str = "config.json") -> Architecture:
    """The first known name of config.json's `architectures`; without architectures, the one of its `model_type`.

    Raises:
        ConfigError: with the file and the supported architectures.
    """
    _load_entry_points()
    for name in names:
        if name in _architectures:
            return _architectures[name]
    if not names and model_type in _BY_MODEL_TYPE:
        return _architectures[_BY_MODEL_TYPE[model_type]]
    asked = f"architectures {', '.join(names)}" if names else f"model_type {model_type!r} without architectures"
    raise ConfigError(
        f"{source}: {asked} is not supported; supported: {', '.join(sorted(_architectures))}. "
        "Register an external model with moe_engine.models.register"
    )


def added() -> list[tuple[str, str, str]]:
    """Arguments of `register` for this process's additions, as dotted paths that another process can import.

    Raises:
        ConfigError: a class is not importable from another process (a script's ``__main__``, a function body).
    """
    changed = [a for name, a in _architectures.items() if _BUILT_IN.get(name) != a]
    return [(a.name, _dotted(a.target), _dotted(a.config_parser)) for a in changed]


def _dotted(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", "")
    if target.__module__ == "__main__" or not name.isidentifier():
        raise ConfigError(
            f"register: the engine process cannot import {name or target!r} from {target.__module__}; put it at the "
            "top level of an importable module and register that, or its dotted path 'module:name'"
        )
    return f"{target.__module__}:{name}"


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name.endswith(("ForCausalLM", "ForConditionalGeneration")):
            register(point.name, point.value)
            continue
        try:
            point.load()()
        except Exception as error:  # an external package: its models are missing, built-in ones still load
            logger.warning("entry point %s = %s of %s failed: %r", point.name, point.value, ENTRY_POINT_GROUP, error)
