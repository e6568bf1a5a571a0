"""Prints the generated tables of docs/models.md, from the tables of formats, kernel rows and architectures;
with ``--write`` writes them into the page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_engine.kernels import tables
from moe_engine.kernels.quantization.codes import FP4, INTEGERS
from moe_engine.kernels.quantization.protocol import BlockFP8, RowFP8
from moe_engine.kernels.registry import BIASES, CAPPED, CHUNKED, SINKS, SPANS, SPARSE, WINDOWS, Row
from moe_engine.kernels.weight_forms import WeightForm
from moe_engine.models import registry
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.fp4_experts import FP4ExpertsFormat
from moe_engine.models.formats.fused_experts import MXFP4, FusedExpertsFormat
from moe_engine.models.formats.online import online_format
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.formats.table import FORMATS, parse_format

PAGE = Path(__file__).with_name("models.md")
BEGIN = "<!-- made by python docs/format_table.py --write; do not edit -->"
END = "<!-- end of the made tables -->"
PRODUCTS = ("linear", "experts")
OTHERS = "GQA (sliding windows: in every row)", ("gqa",), WINDOWS
"""As `attention_of` returns it, for most architectures."""
MATRIX = "model.layers.0.mlp.up_proj"
EXPERT = "model.layers.0.mlp.experts.0.up_proj"

_GROUPS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
_FP4 = {"num_bits": 4, "type": "float", "group_size": 16}
CHECKPOINTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("block FP8, 128 x 128", "fp8", {"weight_block_size": [128, 128]}),
    ("FP8, a scale per matrix", "fp8", {"activation_scheme": "static"}),
    ("FP8, a scale per row", "fbgemm_fp8", {}),
    ("FP8, a scale per row", "w8a8_fp8", {}),
    ("MXFP8", "mxfp8", {}),
    ("FP8", "modelopt", {"quant_algo": "FP8"}),
    ("MXFP8", "modelopt", {"quant_algo": "MXFP8"}),
    ("FP8, blocks of 128 x 128", "modelopt", {"quant_algo": "FP8_PB_WO"}),
    ("NVFP4", "modelopt", {"quant_algo": "NVFP4"}),
    ("4 bits", "awq", {"bits": 4, "group_size": 128}),
    ("4 bits", "gptq", {"bits": 4, "group_size": 128, "sym": True}),
    ("8 bits", "gptq", {"bits": 8, "group_size": 128, "sym": True}),
    ("4 bits, act-order", "gptq", {"bits": 4, "group_size": 128, "sym": True, "desc_act": True}),
    ("4 bits", "auto-round", {"bits": 4, "group_size": 128, "sym": True}),
    ("pack-quantized", "compressed-tensors", {"format": "pack-quantized", "weights": _GROUPS}),
    ("pack-quantized, zero points", "compressed-tensors",
     {"format": "pack-quantized", "weights": _GROUPS | {"symmetric": False}}),
    ("int-quantized", "compressed-tensors",
     {"format": "int-quantized", "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}),
    ("float-quantized", "compressed-tensors", {"format": "float-quantized", "weights": _FP8_ROWS}),
    ("float-quantized, blocks of 128 x 128", "compressed-tensors",
     {"format": "float-quantized", "weights": _FP8_ROWS | {"strategy": "block", "block_structure": [128, 128]}}),
    ("mxfp8-quantized", "compressed-tensors",
     {"format": "mxfp8-quantized", "weights": _FP8_ROWS | {"strategy": "group"}}),
    ("nvfp4-pack-quantized", "compressed-tensors", {"format": "nvfp4-pack-quantized", "weights": _FP4}),
    ("mxfp4-pack-quantized", "compressed-tensors",
     {"format": "mxfp4-pack-quantized", "weights": _FP4 | {"group_size": 32}}),
    ("int8, a scale per row", "w8a8_int8", {}),
    ("nf4", "bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    ("int8", "bitsandbytes", {"load_in_8bit": True}),
    *((kind, "gguf", {"types": {MATRIX: kind, EXPERT.replace(".0.up", ".*.up"): kind}}) for kind in BLOCK_TYPES),
)  # fmt: skip
"""Stored form, `quant_method`, and the rest of `quantization_config`."""
ONLINE = ("int4", "int8", "int4wo-128", "int8wo", "fp8")


def page() -> str:
    """Both tables, with their start and end marks."""
    formats = table(("weights", "chosen by", "on a CPU", "on a GPU"), format_rows())
    kernels = table(("architecture", "attention", "on a CPU", "on a GPU"), architecture_rows())
    texts = (BEGIN, "", formats, "Kernels of attention:", "", kernels, END)
    return "\n".join(texts) + "\n"


def format_rows() -> Iterator[tuple[str, ...]]:
    yield ("bfloat16, float16, float32", "no `quantization_config`", *places(PLAIN, MATRIX))
    for text, method, section in CHECKPOINTS:
        yield (text, f"`quant_method` {method}" if method != "gguf" else "GGUF file", *places(parsed(method, section)))
    gpt_oss = FusedExpertsFormat(8, MXFP4)
    yield ("MXFP4 experts", "gpt-oss, `quant_method` mxfp4", *places(gpt_oss, EXPERT))
    yield ("block FP8, MXFP4 experts", "DeepSeek V4, `expert_dtype` fp4", *places(FP4ExpertsFormat(), EXPERT))
    for name in ONLINE:
        made = online_format(name)
        assert made is not None
        yield ("bfloat16, float16, float32", f"`--quantization {name}`", *places(made))
    missing = FORMATS.keys() - {method for _, method, _ in CHECKPOINTS}
    assert not missing, f"add {missing} to CHECKPOINTS"


def parsed(method: str, section: dict[str, Any]) -> WeightFormat:
    if method == "compressed-tensors":
        weights = {"targets": ["Linear"], "weights": section["weights"]}
        section = {"format": section["format"], "config_groups": {"group_0": weights}}
    return parse_format(Fields({"quantization_config": {"quant_method": method, **section}}, method))


def places(format: WeightFormat, prefix: str = MATRIX) -> tuple[str, str]:
    return place(format, "cpu", prefix), place(format, "cuda", prefix)


def place(format: WeightFormat, device: str, prefix: str) -> str:
    """The forms that kernels multiply on a device, with their rows."""
    rows = {family: on_device(tables.FAMILIES[family], device) for family in PRODUCTS}
    if format == PLAIN:
        return f"as stored: {names(rows['linear'])}"
    multiplied = {
        family: frozenset[WeightForm]().union(*(row.multiplies for row in found)) for family, found in rows.items()
    }
    kept = format.held_by(multiplied)
    form = None if kept == PLAIN else kept.kernel_format(prefix)
    family = "experts" if prefix == EXPERT else "linear"
    if prefix == EXPERT:  # with biases
        rows[family] = [row for row in rows[family] if BIASES in row.supports]
    takes = [row for row in rows[family] if multiplies(row, form)]
    if form is None or not takes:
        plain = f"dequantized: {names(rows[family])}"
        experts = [row for row in rows["experts"] if multiplies(row, form)]
        return f"{plain}; experts {text_of(form, device)}: {names(experts)}" if experts and kept != PLAIN else plain
    others = [row for row in rows[family] if row.name not in {taken.name for taken in takes}]
    rest = f"; dequantized: {names(others)}" if others else ""
    return f"{text_of(form, device)}: {names(takes)}{rest}"


def multiplies(row: Row, form: Any) -> bool:
    return form is not None and form.form in row.multiplies


def text_of(form: Any, device: str) -> str:
    if isinstance(form, BlockFP8):
        return "FP8 blocks of 128 x 128"
    if isinstance(form, RowFP8):
        return "FP8, a scale per row"
    kind = f"int{form.bits}" if form.values == INTEGERS else form.values
    kept = f"a {form.scales}"
    if device == "cuda" and form.values == FP4:
        kept = "an e8m0" if form.mxfp4 else "an e4m3"
    scales = f"{kept} scale " + (f"per {form.group}" if form.group else "per row")
    return (
        f"{kind}, {scales}"
        + (", zero points" if form.zeros else "")
        + (f", offsets, factors for {form.factors} groups" if form.factors > 1 else ", offsets" if form.factors else "")
    )


def on_device(rows: Iterable[Row], device: str) -> list[Row]:
    """Rows on a device, the most preferred first."""
    found = [row for row in rows if row.name == "torch" or (row.name == "cpu") == (device == "cpu")]
    return sorted(found, key=lambda row: -row.preference)


def names(rows: Iterable[Row]) -> str:
    return ", ".join(f"`{row.name}`" for row in rows)


def architecture_rows() -> Iterator[tuple[str, ...]]:
    seen: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for name in registry.supported():
        if registry.is_built_in(name):
            seen.setdefault(attention_of(registry.find([name])), []).append(name)
    for (kind, families, need), known in sorted(seen.items(), key=lambda item: item[0] == OTHERS):
        cells = []
        for device in ("cpu", "cuda"):
            rows = [
                [
                    row
                    for row in on_device(tables.FAMILIES[family], device)
                    if (not need or family != families[0] or need in row.supports)
                    and (row.name != "deep_gemm" or "pools" not in kind)  # keys of pools are not in FP8
                ]
                for family in families
            ]
            texts = (f"{family}: {names(found)}" for family, found in zip(families, rows))
            cells.append(names(rows[0]) if len(families) == 1 else "; ".join(texts))
        yield ("all others" if kind == OTHERS[0] else ", ".join(f"`{name}`" for name in known), kind, *cells)


def attention_of(architecture: registry.Architecture) -> tuple[str, tuple[str, ...], str]:
    """Text, kernel families, and the required capability of a row of the first one."""
    parser, target = str(architecture.config_parser), str(architecture.target)
    if "parse_sparse_deepseek" in parser or "config_parsers.mistral_large4:" in parser:
        return "MLA, sparse", ("mla", "indexer"), SPARSE
    if "mistral3:make_model" in target:
        return "that of the text model, GQA or MLA", ("gqa", "mla"), ""
    if "config_parsers.compressed:" in parser or "config_parsers.shared_entries:" in parser:
        return "windows and compressed entries, sinks", ("mla", "indexer", "compression"), SINKS
    if "config_parsers.glm5_next:" in parser:
        return "Kimi Delta Attention, MLA over pools of tokens", ("mla", "indexer", "delta"), SINKS
    if "config_parsers.qwen4_exp:" in parser:
        return "gated delta nets, GQA over pools of tokens", ("gqa", "indexer", "delta"), SPARSE
    if "config_parsers.minimax_m3:" in parser:
        return "GQA over selected blocks", ("gqa", "block_index"), ""
    if "kimi_linear:" in target:
        return "Kimi Delta Attention, MLA (Kimi K3: with a gate)", ("mla", "delta"), ""
    if "ling:" in target:
        kind = "lightning attention, MLA" if "v2_5" in parser else "Kimi Delta Attention, MLA with a gate"
        return kind, ("mla", "delta"), ""
    if any(name in target for name in ("deepseek:", "longcat_flash:", "kimi:")):
        return "MLA", ("mla",), ""
    if "minimax_text:" in target:
        return "lightning attention, GQA", ("gqa", "delta"), ""
    if "nemotron_h:" in target:
        return "Mamba2, GQA", ("gqa", "delta"), ""
    if "lfm2:" in target:
        return "short convolutions, GQA", ("gqa",), ""
    if "config_parsers.hybrid:" in parser:
        return "gated delta nets, GQA", ("gqa", "delta"), ""
    if any(name in parser for name in ("parse_gpt_oss", "config_parsers.mimo:", "parse_granite_swa")):
        return "GQA, windows, sinks", ("gqa",), SINKS
    if "families.gemma3:" in target:
        return "GQA, windows, all tokens of an image", ("gqa",), SPANS
    if "parse_gemma2" in parser:
        return "GQA, windows, bounded scores", ("gqa",), CAPPED
    if "config_parsers.llama4:" in parser:
        return "GQA, chunks", ("gqa",), CHUNKED
    return OTHERS


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def replaced(text: str) -> str:
    """The page with the current tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(f"{END}\n")
    return before + page() + after


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(replaced(PAGE.read_text()))
    else:
        print(page(), end="")
