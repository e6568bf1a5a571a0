"""Writes docs/screenshot.svg: the start of a server on this machine and its answer: ``python docs/screenshot.py``."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.text import Text

FILE = Path(__file__).with_name("screenshot.svg")
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
WIDTH, MAX_LINES = 130, 24
TEMPLATE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""rich's format without web fonts."""


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print("[bold green]$[/] moe-engine serve")
    server = subprocess.Popen(
        [sys.executable, "-m", "moe_engine.launch_server", "--port", "30000"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        _show(console, *_start(server))
    finally:
        server.terminate()
        server.wait()
    console.save_svg(str(FILE), title="moe-engine", code_format=TEMPLATE, unique_id="screen")
    print(f"wrote {FILE}")


def _start(server: subprocess.Popen[str]) -> tuple[list[str], str]:
    """The log up to READY, and the server's address."""
    lines: list[str] = []
    assert server.stdout is not None
    for line in server.stdout:
        lines.append(line.rstrip())
        if (found := re.search(r"READY in .* on port (\d+)", line)) is not None:
            return lines, f"localhost:{found[1]}"
    raise SystemExit("\n".join(lines))


def _show(console: Console, lines: list[str], address: str) -> None:
    for line in lines[-MAX_LINES:]:
        if "\r" not in line and "%|" not in line:  # progress bars
            console.print(Text(line.partition(". Try:")[0][: WIDTH - 1]), highlight=True)
    body = json.dumps(QUESTION)
    console.print(Text.assemble(("$", "bold green"), f" curl {address}/v1/chat/completions -d '{body}'"))
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        console.print_json(json.dumps(json.load(answer)["choices"][0]["message"]))


if __name__ == "__main__":
    main()
