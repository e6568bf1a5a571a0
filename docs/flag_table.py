"""Prints docs/sglang_flags.md, made from moe_engine/config; with ``--write`` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from moe_engine.config.absent_flags import AbsentFlag, absent_flags
from moe_engine.config.args import PARTS
from moe_engine.config.field import FieldInfo, fields_of, option_of
from moe_engine.config.flags import GROUPS

PAGE = Path(__file__).with_name("sglang_flags.md")

HEAD = """\
# Flag compatibility with SGLang

Whether the engine takes a flag of your SGLang command. Every flag is in one of four groups:

- [accepted](#accepted)
- [accepted without effect](#accepted-without-effect), with a note in the log
- refused with exit code 2: [not supported yet](#refused-not-supported-yet)
- refused with exit code 2: [removed from SGLang](#refused-removed-from-sglang)

A misspelled flag is refused with the nearest accepted one.

```bash
moe-engine serve --explain --tp-size 1 --enable-metrics      # your flags; prints what would run and starts nothing
moe-engine serve --help tp-size                              # the flags with a word
```

Keywords of `Engine` and keys of a `--config` file are the flags' names with underscores.
`python docs/flag_table.py --write` makes this page from `moe_engine/config/`; do not edit it.
"""

ACCEPTED = """\
Flags with an effect, SGLang's and this engine's own. Values in the last column are refused as not supported yet.
"""

SATISFIED_TEXT = """\
Switches that turn off something this engine does not have. The log contains a note.
"""

LATER_TEXT = """\
In brackets: the values that are accepted, SGLang's defaults or what this engine does anyway.
"""

DROPPED_TEXT = """\
Flags of older SGLang releases, with the values that are accepted in brackets.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Accepted\n", ACCEPTED]
    for part in PARTS.values():
        rows = [accepted_row(info) for info in fields_of(part)]
        parts.append(f"### {GROUPS[part.__name__]}\n")
        parts.append(table(("flag", "other spellings", "values", "values that are refused"), rows))
    absent = absent_flags()
    parts += ["## Accepted without effect\n", SATISFIED_TEXT]
    parts.append(table(("flag", "reason"), [(code([option_of(name)]), why) for name, why in absent.no_effect.items()]))
    parts += ["## Refused: not supported yet\n", LATER_TEXT]
    parts.append(table(("missing feature", "flags"), refused_rows("refused", removed=False)))
    parts += ["## Refused: removed from SGLang\n", DROPPED_TEXT]
    parts.append(table(("replacement", "flags"), refused_rows("removed from SGLang", removed=True)))
    foreign = f"Flags of `docker run` in a copied command are named as such: {', '.join(absent.docker_run)}.\n"
    return "\n".join([*parts, foreign])


def accepted_row(info: FieldInfo) -> tuple[str, ...]:
    flag = info.flag
    allowed = flag.allowed()
    values = ", ".join(allowed) if allowed else "switch" if info.type is bool else flag.metavar or info.type.__name__
    if flag.synonyms:
        values += "; " + ", ".join(f"{synonym} = {meaning}" for synonym, meaning in flag.synonyms.items())
    by_reason: dict[str, list[str]] = {}
    for value, reason in flag.unsupported.items():
        by_reason.setdefault(reason, []).append(value)
    refused = "; ".join(f"{', '.join(listed)} ({reason})" for reason, listed in by_reason.items())
    return code([info.option]), code(info.spellings[1:]), values, refused


def refused_rows(state: str, *, removed: bool) -> list[tuple[str, ...]]:
    """A row for each reason, with all its flags."""
    found: dict[str, list[str]] = {}
    for flag in absent_flags().flags.values():
        if flag.removed == removed:
            found.setdefault(flag.reason, []).append(refused_flag(flag))
    return [(f"{state}: {reason}", ", ".join(flags)) for reason, flags in found.items()]


def refused_flag(flag: AbsentFlag) -> str:
    values = ", ".join("false" if value is False else str(value) or '""' for value in flag.accepted)
    names = " = ".join(f"`{option_of(name)}`" for name in (flag.name, *flag.spellings))
    return f"{names} ({values})" if values else names


def code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
