"""Targets with briefly trained draft heads, so that some drafts are accepted."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.speculation.agreeing import agreeing_checkpoint
from tests.speculation.block_heads import BlockForm, ReferenceBlockHead, block_counts
from tests.speculation.eagle_heads import LAYERS, Form, ReferenceHead, Target, offline_counts

FLAGS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 8}
MAP = tuple(range(0, 256, 2))
WINDOWS = {
    "use_sliding_window": True, "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
FORMS: dict[str, tuple[str, Form | BlockForm]] = {
    "eagle2": ("llama", Form(eagle3=False, bias=True)),
    "eagle2 of qwen3": ("qwen3", Form(eagle3=False)),
    "eagle2 mapped": ("qwen3", Form(eagle3=False, token_map=MAP)),
    "eagle3": ("qwen3", Form(num_tokens=200)),
    "eagle3 on mla": ("deepseek_v3", Form(num_tokens=160)),
    "eagle3 on blocks": ("minimax_m3", Form(num_tokens=200)),
    "eagle3 of mla": ("deepseek_v3", Form(layer="deepseek", norms_states=True, norms_joined=True, norms_output=True)),
    "eagle3 variants": ("llama", Form(norms_residual=True, own_head=False)),
    "eagle3 of three layers": ("qwen3", Form(num_layers=3, num_tokens=200)),
    "eagle2 of two mla layers": ("deepseek_v2_lite", Form(eagle3=False, layer="deepseek", num_layers=2)),
    "eagle2 of mla": ("deepseek_v2_lite", Form(eagle3=False, layer="deepseek")),
    "dflash": ("qwen3", BlockForm()),
    "dspark": ("deepseek_v3", BlockForm(size=4, markov="vanilla", num_layers=3, tapped=(-1, 1, 3))),
    "dspark with a gate": ("qwen3", BlockForm(markov="gated", confidence=False)),
    "eagle3 of speculators": ("qwen3", Form(layer="qwen3", num_tokens=200, norms_residual=True, speculators=True)),
    "dflash of speculators": ("qwen3", BlockForm(num_tokens=190, speculators=True)),
    "dspark of speculators": ("llama", BlockForm(markov="gated", num_tokens=200, anchor=False, speculators=True)),
    "dspark in windows": (
        "qwen3",
        BlockForm(markov="vanilla", num_layers=3, num_tokens=200, speculators=True, fields=WINDOWS),
    ),
    "dspark with a cell": ("llama", BlockForm(markov="rnn", layer="llama", num_layers=1, tapped=(2,))),
}
"""Kind of the target, and of the head."""


@dataclass
class Pair:
    """A target with a briefly trained head."""

    path: Path
    head: ReferenceHead | ReferenceBlockHead
    head_path: Path
    prompts: list[list[int]]

    def flags(self, **more: Any) -> dict[str, Any]:
        form = self.head.form
        flags = {**FLAGS, "speculative_algorithm": form.algorithm, "speculative_draft_model_path": str(self.head_path)}
        if isinstance(form, Form) and form.token_map:
            flags["speculative_token_map"] = str(self.head_path / "map.pt")
        return flags | more

    def counts(self, prompt: list[int], answer: list[int], depth: int) -> tuple[list[int], list[int]]:
        """Proposed and accepted drafts of the reference at each depth."""
        return counts_of(self.head, prompt, answer, depth)


def reference(form: Form | BlockForm, target: Target, seed: int) -> ReferenceHead | ReferenceBlockHead:
    return ReferenceHead(form, target, seed) if isinstance(form, Form) else ReferenceBlockHead(form, target, seed)


def counts_of(
    head: ReferenceHead | ReferenceBlockHead, prompt: list[int], answer: list[int], depth: int
) -> tuple[list[int], list[int]]:
    count = offline_counts if isinstance(head, ReferenceHead) else block_counts
    return count(head, prompt, answer, depth)  # type: ignore[arg-type]


def make_pair(name: str, folder: Path, steps: int = 40, texts: int = 4, **fields: Any) -> Pair:
    """`texts`: texts of the target, the training data of the head for `steps`. `fields`: fields of the target's
    config.json."""
    kind, form = FORMS[name]
    path = agreeing_checkpoint(kind, folder / "target", random.randrange(1000), num_hidden_layers=LAYERS, **fields)
    target = Target(path)
    seed = random.randrange(1000)
    head = reference(form, target, seed)
    prompts = [[random.randrange(250) for _ in range(5 * i + 4)] for i in range(4)]
    starts: list[list[int]] = [prompts[i % 4] + [random.randrange(250)] for i in range(texts)]
    if isinstance(form, BlockForm):  # a block learns the text by heart
        starts, steps = prompts, 2 * steps
    head.distil([target.continued(start, 48) for start in starts], steps)
    written = head.write(folder / "head")
    (folder / "starts.json").write_text(json.dumps(starts))
    if isinstance(form, Form) and form.token_map:
        torch.save(list(form.token_map), written / "map.pt")
    return Pair(path, head, written, prompts)


def main() -> None:
    """``python -m tests.speculation.eagle_pairs NAME FOLDER SEED FIELDS``, for a process that cannot train."""
    name, folder, seed, fields = sys.argv[1:]
    random.seed(int(seed))
    make_pair(name, Path(folder), 150, 8, **json.loads(fields))


if __name__ == "__main__":
    main()
