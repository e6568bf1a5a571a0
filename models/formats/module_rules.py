"""The linear modules of a checkpoint named by a quantization config. Imports no torch.

Three spellings occur: names or their parts (``modules_to_not_convert``, ``exclude_modules`` with ``*``),
compressed-tensors' targets: a class name, a module's name, or ``re:`` and a regular expression, and ModelOpt's lists of
every module (``quantized_layers``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from moe_engine.models.config_sections.fields import Fields

_PREFIXES = ("language_model.model.", "language_model.", "model.language_model.")
_EXPERT = re.compile(r"\.experts\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Modules:
    """A set of modules.

    Attributes:
        targets: compressed-tensors' spelling; "Linear" is every linear module.
        parts: a module is in the set if a part is its name, its start or its end, between dots, or matches with
            ``*``.
        named: modules by their whole names, ``*`` for all experts (`every_expert`), with the modules inside them. Not
            in the `repr`: the order of a set differs between processes.
    """

    targets: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    named: frozenset[str] = field(default=frozenset(), repr=False)

    def __contains__(self, prefix: object) -> bool:
        return isinstance(prefix, str) and _matches(self, prefix)


NONE = Modules()


@lru_cache(maxsize=1 << 16)
def _matches(modules: Modules, prefix: str) -> bool:
    if modules.named and any(outer in modules.named for outer in _outer(every_expert(prefix))):
        return True
    name = prefix.replace("*", "0")  # of all experts
    names = (name, name.replace(".mlp.", ".feed_forward."))  # dense layers of Llama 4
    return any(_is_target(own, target) for own in names for target in modules.targets) or any(
        _has_part(own, part) for own in names for part in modules.parts
    )


def every_expert(name: str) -> str:
    """The name of a module, which every expert of its layer has."""
    return _EXPERT.sub(".experts.*", name)


def named_modules(names: Iterable[str]) -> frozenset[str]:
    """`Modules.named` of names in a config."""
    return frozenset(every_expert(_plain(name)) for name in names)


def _outer(name: str) -> Iterator[str]:
    """The module, and those that contain it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_target(name: str, target: str) -> bool:
    if target.startswith("re:"):
        return any(re.match(target[3:], spelled) for spelled in _spellings(name))
    return target == "Linear" or _plain(target) == name


def _has_part(name: str, part: str) -> bool:
    part = _plain(part)
    if "*" in part:
        return fnmatchcase(name, part)
    return f".{part}." in f".{name}."


def _spellings(name: str) -> tuple[str, ...]:
    """The name, and its form in a multimodal checkpoint."""
    return (name, *(prefix + name.removeprefix("model.") for prefix in _PREFIXES))


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            return f"model.{rest}" if prefix != "language_model." and not rest.startswith("lm_head") else rest
    return name


def name_list(section: Fields, *keys: str) -> tuple[str, ...]:
    """The names of the first of these fields that is present. Raises ConfigError: not a list of strings."""
    for key in keys:
        found = section.raw.get(key)
        if found is None:
            continue
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            section.fail(key, f"must be a list of module names, found {found!r}")
        return tuple(found)
    return ()


def check_patterns(section: Fields, key: str, targets: tuple[str, ...]) -> None:
    """Raises ConfigError for a regular expression that does not compile."""
    for target in targets:
        if target.startswith("re:"):
            try:
                re.compile(target[3:])
            except re.error as error:
                section.fail(key, f"has a pattern that is no regular expression: {target!r} ({error})")
