"""Typed reading of config.json: every error has the file, the field and the fix. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from moe_engine.errors import ConfigError
from moe_engine.models.checkpoint.regular_file import check_regular
from moe_engine.models.config_sections.rope import RopeConfig

_MISSING: Any = object()
_JSON_KINDS: Mapping[type, str] = {dict: "object", list: "list"}
MAX_INTEGER = 2**53
_TIED = "tie_word_embeddings"
_ORIGINAL_LENGTH = "original_max_position_embeddings"
LARGEST = {"num_hidden_layers": 65536, "n_routed_experts": 65536, "num_experts": 65536, "num_local_experts": 65536}
"""Count fields that determine list lengths."""


def read_json(file: Path, kind: type = dict) -> Any:
    """The object (or list) in a JSON file. Raises ConfigError if absent, unreadable or of another kind."""
    try:
        check_regular(file)
        value = json.loads(file.read_bytes())
    except NotADirectoryError:
        raise ConfigError(
            f"{file.parent}: a file; --model-path must be a Hugging Face checkpoint directory, its config.json or a "
            "GGUF file"
        ) from None
    except FileNotFoundError:
        if file.is_symlink():
            raise ConfigError(f"{file}: a link to a missing file; copy the whole checkpoint") from None
        cached = file.parent / "snapshots"  # of a folder of the hub's cache
        hint = f", for instance one in {cached}" if cached.is_dir() else ""
        raise ConfigError(
            f"{file}: no such file; --model-path must be a Hugging Face checkpoint directory{hint}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(value, kind):
        raise ConfigError(f"{file}: must hold a JSON {_JSON_KINDS[kind]}, found {type(value).__name__}")
    return value


def added_tokens(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Ids of these added tokens by the tokenizer's files; without those that they do not list. Raises ConfigError."""
    ids = dict[Any, int]()
    if (file := folder / "tokenizer_config.json").is_file():
        listed = read_json(file).get("added_tokens_decoder") or {}
        ids = {token.get("content"): int(number) for number, token in listed.items()}
    if not all(name in ids for name in names) and (file := folder / "tokenizer.json").is_file():
        ids = {token.get("content"): token.get("id") for token in read_json(file).get("added_tokens") or ()}
    return {name: ids[name] for name in names if name in ids}


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the fields of `overrides`; objects on both sides are merged field by field."""
    merged = dict(base)
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def text_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's fields, taken from `text_config` in multimodal files."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return dict(raw)
    outer = {key: value for key, value in raw.items() if key != "text_config"}
    both = [part["architectures"] for part in (raw, text) if isinstance(part.get("architectures"), list)]
    # the text model's own serves a model whose tower is not known
    names: dict[str, Any] = {"architectures": [name for part in both for name in part] or None}
    tied = {key: raw[key] for key in (_TIED,) if raw.get(key) is not None}  # the head is not a part of the text model
    return {**outer, **text, **names, **tied}


def is_whole(value: Any) -> TypeGuard[int | float]:
    """True for an int, or a float with an integral value, as some tools write."""
    return value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)


class Fields:
    """A config object with typed getters. Ints may be stored as whole floats, as some tools write them."""

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw = raw
        self.source = source
        self._prefix = prefix

    def fail(self, name: str, complaint: str) -> NoReturn:
        raise ConfigError(f"{self.source}: {self._prefix}{name} {complaint}")

    def present(self) -> dict[str, Any]:
        """The fields that have a value."""
        return {name: value for name, value in self.raw.items() if value is not None}

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            if default is _MISSING:
                self.fail(name, "is missing; add it, or pass it with --json-model-override-args")
            return default
        return value

    def integer(self, name: str, default: Any = _MISSING, minimum: int = 1) -> Any:
        """An int of at least `minimum`; None passes only as the default."""
        value = self._get(name, default)
        if value is default and default is not _MISSING:
            return value
        if not is_whole(value):
            self.fail(name, f"must be a whole number, found {value!r}")
        if value < minimum:
            self.fail(name, f"must be at least {minimum}, found {value}")
        if value > (most := LARGEST.get(name, MAX_INTEGER)):
            self.fail(name, f"must be at most {most}, found {value}")
        return int(value)

    def number(self, name: str, default: Any = _MISSING, above: float | None = None) -> Any:
        """A finite number greater than `above`; None passes only as the default."""
        value = self._get(name, default)
        if value is default and default is not _MISSING:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(name, f"must be a number, found {value!r}")
        if above is not None and value <= above:
            self.fail(name, f"must be more than {above:g}, found {value}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; null is false, whatever the default."""
        value = self._get(name, default and name not in self.raw)
        if not isinstance(value, bool):
            self.fail(name, f"must be true or false, found {value!r}")
        return value

    def text(self, name: str, default: Any = _MISSING) -> Any:
        value = self._get(name, default)
        if value is not None and not isinstance(value, str):
            self.fail(name, f"must be a string, found {value!r}")
        return value

    def choice(self, name: str, default: Any, *served: str) -> Any:
        """A string that is one of `served`, or the default."""
        value = self.text(name, default)
        if value != default and value not in served:
            self.fail(name, f"{value!r} is not supported; supported: {', '.join(served)}")
        return value

    def items(self, name: str, *default: Any) -> list[Any]:
        """A list, or the default if the field is absent."""
        value = self._get(name, [*default])
        if not isinstance(value, list):
            self.fail(name, f"must be a list, found {value!r}")
        return value

    def by_layer(self, name: str, layers: int, known: Iterable[Any]) -> list[Any] | None:
        """A list with one of `known` for each layer, cut after the last layer; None if the field is absent."""
        value, known = self.raw.get(name), list(known)  # a list: its members may be of any type, and need no hash
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < layers or not all(kind in known for kind in value):
            self.fail(name, f"needs {layers} of {', '.join(map(str, known))}, not {value!r}")
        return value[:layers]

    def check_served(self, served: Mapping[str, Any]) -> None:
        """Raises ConfigError for a field that has another value than the served one, or than those of a tuple."""
        for name, value in served.items():
            values = value if isinstance(value, tuple) else (value,)
            if self.has(name) and self.raw[name] not in values:
                self.fail(name, f"{self.raw[name]!r} is not supported; supported: {', '.join(map(str, values))}")

    def section(self, name: str) -> Fields | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(name, f"must be an object, found {value!r}")
        return Fields(value, self.source, f"{self._prefix}{name}.")


def parse_rope(fields: Fields, width: int, interleaved: bool, scales_softmax: bool) -> RopeConfig:
    """Rotary settings in either format: `rope_scaling` with `rope_theta`, or `rope_parameters`.

    Args:
        width: rotated channels of a head.
        scales_softmax: True if mscale_all_dim multiplies the softmax scale (DeepSeek): of any scaling, not only YaRN.
    """
    section = rope_section(fields) or Fields({}, fields.source)
    kind = section.text("rope_type", None) or section.text("type", None) or "default"
    rope = _parse_kind(fields, section, kind, width, interleaved)
    all_dim = section.number("mscale_all_dim", None) if scales_softmax and kind != "default" else None
    if not all_dim:
        return rope
    factor = section.number("factor", None, above=0) or rope.factor
    return replace(rope, softmax_factor=yarn_mscale(factor, all_dim) ** 2)


def _parse_kind(fields: Fields, section: Fields, kind: str, width: int, interleaved: bool) -> RopeConfig:
    theta = section.number("rope_theta", None, above=0) or fields.number("rope_theta", 10000.0, above=0)
    if width % 2:
        fields.fail("partial_rotary_factor", f"and head_dim give {width} rotated channels; their number must be even")
    if kind in ("default", "mrope"):
        return RopeConfig(theta, width, interleaved)
    if kind == "dynamic":  # beyond max_position_embeddings, which no request exceeds; Hunyuan: always, by alpha
        alpha = section.number("alpha", None, above=0)
        return RopeConfig(theta if alpha is None else theta * alpha ** (width / (width - 2)), width, interleaved)
    original = _original_length(fields, section)
    if kind == "linear":
        factor = section.number("factor", above=0)
        return RopeConfig(theta, width, interleaved, kind, factor=factor, max_position=int(factor * original))
    if kind == "llama3":
        low, high = section.number("low_freq_factor", above=0), section.number("high_freq_factor", above=0)
        if high < low:
            section.fail("high_freq_factor", f"{high:g} is less than low_freq_factor {low:g}")
        return RopeConfig(
            theta,
            width,
            interleaved,
            kind,
            factor=section.number("factor", above=0),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        return _parse_yarn(fields, section, RopeConfig(theta, width, interleaved, kind, 1.0, original))
    if kind == "longrope":
        return _parse_longrope(fields, section, RopeConfig(theta, width, interleaved, kind, 1.0, original))
    section.fail("rope_type", f"{kind!r} is not supported; supported: default, linear, llama3, yarn, longrope, dynamic")


def rope_section(fields: Fields) -> Fields | None:
    """`rope_scaling`, or `rope_parameters`: the first that has fields, as transformers reads files with both."""
    found = (fields.section(name) for name in ("rope_scaling", "rope_parameters"))
    return next((section for section in found if section is not None and section.raw), None)


def check_heads(section: Fields, name: str, heads: int, width: int) -> None:
    """Raises ConfigError for heads of a vision tower that rows and columns cannot rotate."""
    if width % heads or (width // heads) % 4:
        section.fail(name, f"{heads} does not divide {width} into heads of a multiple of 4 channels")


def _original_length(fields: Fields, section: Fields) -> int:
    """Positions before scaling. A field next to the section comes first, as in transformers."""
    own = (part.integer(_ORIGINAL_LENGTH, None) for part in (fields, section))
    length: int = next(filter(None, own), None) or fields.integer("max_position_embeddings")
    return length


def parse_context_length(fields: Fields, rope: RopeConfig) -> int:
    """Max sequence length as SGLang derives it: `max_position_embeddings`, multiplied by the factor of the rotary
    scaling unless the file states the length before scaling."""
    positions = fields.integer("max_position_embeddings")
    section = rope_section(fields)
    if section is None or any(part.has(_ORIGINAL_LENGTH) for part in (section, fields)):
        return int(positions)
    return max(positions, rope.max_position)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's magnitude correction: 1 for factor <= 1, else 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _parse_yarn(fields: Fields, section: Fields, base: RopeConfig) -> RopeConfig:
    factor = section.number("factor", None, above=0)
    if factor is None:
        factor = fields.integer("max_position_embeddings") / base.original_max_position
    mscale, all_dim = section.number("mscale", None), section.number("mscale_all_dim", None)
    attention_factor = section.number("attention_factor", None)
    if attention_factor is None:
        both = bool(mscale) and bool(all_dim)
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if both else yarn_mscale(factor)
    return replace(
        base,
        factor=factor,
        max_position=int(factor * base.original_max_position),
        beta_fast=section.number("beta_fast", 32.0, above=0),
        beta_slow=section.number("beta_slow", 1.0, above=0),
        truncate=section.flag("truncate", True),
        attention_factor=attention_factor,
    )


def _parse_longrope(fields: Fields, section: Fields, base: RopeConfig) -> RopeConfig:
    """Factors for contexts longer than the original one, and for others; an attention factor for both, or for each
    (Phi-3.5-MoE)."""
    positions, original = fields.integer("max_position_embeddings"), base.original_max_position
    lists = {}
    for name in ("long_factor", "short_factor"):
        found = section.raw.get(name)
        if not isinstance(found, list) or len(found) != base.width // 2:
            section.fail(name, f"must be a list of {base.width // 2} numbers, one for each rotated pair")
        if not all(isinstance(each, int | float) and 0 < each < math.inf for each in found):
            section.fail(name, "must have numbers above 0")
        lists[name] = tuple(map(float, found))
    factor = section.number("factor", None, above=0) or positions / original
    attention_factor = section.number("attention_factor", None)
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scales = {name: section.number(f"{name}_mscale", attention_factor, above=0) for name in ("long", "short")}
    rope = replace(
        base, factor=factor, attention_factor=scales["long"], pair_factors=lists["long_factor"],
        short_factors=lists["short_factor"], short_attention=scales["short"],
    )  # fmt: skip
    return rope.within(positions)


def parse_eos(fields: Fields, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS token ids: those of generation_config.json, then those of config.json."""
    found: list[int] = []
    for raw in (generation, fields.raw):
        where = raw.get("eos_token_id")
        for token in where if isinstance(where, list) else [where]:
            if token is None:
                continue
            if not is_whole(token):
                source = Path(fields.source).with_name("generation_config.json")
                file = fields if raw is fields.raw else Fields(raw, str(source))
                file.fail("eos_token_id", f"must be an integer or a list of integers, found {where!r}")
            if token not in found:
                found.append(int(token))
    return tuple(found)
