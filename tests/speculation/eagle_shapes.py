"""Random draft heads on random targets: ``python -m tests.speculation.eagle_shapes --count 50``.

Kinds of heads (EAGLE, DFlash, DSpark), numbers of heads, widths, norms, biases, rotary settings, tapped layers, lengths
of blocks and draft vocabularies are drawn. Answers with drafts must be those without, and the counts of accepted drafts
those of a float64 reference.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_engine import Engine
from tests.models import random_shapes
from tests.models.random_shapes import Refused
from tests.speculation.agreeing import agreeing_checkpoint
from tests.speculation.block_heads import BlockForm
from tests.speculation.eagle_heads import Form, Target
from tests.speculation.eagle_pairs import counts_of, reference

TARGETS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2_lite", "deepseek_v3", "glm4_moe")
MORE_TARGETS = (
    "gpt_oss", "minimax_m2", "mimo_v2_flash", "glm4_moe_lite", "hunyuan_v1_dense", "ernie4_5", "ministral3",
    "qwen3_next",
)  # fmt: skip
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 20}
FORMS: dict[str, dict[str, Any]] = {
    "one rank": {}, "tp 2": {"tp_size": 2}, "dp 2": {"tp_size": 2, "attn_dp_size": 2},
    "chunks": {"chunked_prefill_size": 8, "enable_mixed_chunk": True, "page_size": 4},
}  # fmt: skip


@dataclass
class Drawn:
    """kind, fields: of the target. ranks: key of `FORMS`. depth: drafts of a step. tree: children per depth above 1."""

    kind: str
    fields: dict[str, Any]
    form: Form | BlockForm
    ranks: str
    depth: int
    tree: int = 1


def draw(kind: str, rng: random.Random) -> Drawn:
    fields = random_shapes.draw(kind, rng).fields
    ranks = rng.choice([*FORMS])
    layers = 3 if kind in ("gpt_oss", "mimo_v2_flash", "glm4_moe_lite", "qwen3_moe") else rng.choice((3, 4, 6))
    fields |= {"num_hidden_layers": layers, "rms_norm_eps": 1e-5}
    if "first_k_dense_replace" in fields:
        fields["first_k_dense_replace"] = 1
    if kind not in random_shapes.NO_HEAD_DIM:
        fields["hidden_size"] = rng.choice((24, 48, 72))  # which the heads of the EAGLE head divide
    if ranks in ("tp 2", "dp 2"):
        _divide(fields)
    if rng.random() < 0.3:
        block = _draw_block(rng, layers, ranks)
        return Drawn(kind, fields, block, ranks, rng.randint(1, min(block.drafts, 5)))
    return Drawn(kind, fields, _draw_form(rng, layers, fields, ranks), ranks, rng.choice((1, 2, 3)))


def _draw_block(rng: random.Random, layers: int, ranks: str) -> BlockForm:
    layer, even = rng.choice(("qwen3", "llama")), 2 if ranks in ("tp 2", "dp 2") else 1
    heads = even * rng.choice((1, 2, 3))
    fields: dict[str, Any] = {
        "num_attention_heads": heads * rng.choice((1, 2)), "num_key_value_heads": heads, "rms_norm_eps": 1e-5,
        "intermediate_size": even * rng.choice((20, 37, 96)), "rope_theta": rng.choice((1e4, 5e5)),
        "head_dim": rng.choice((8, 16, 24)), "rope_scaling": rng.choice((None, {"rope_type": "linear", "factor": 2.0})),
    }  # fmt: skip
    taps = tuple(sorted(rng.sample(range(-1, layers), rng.randint(1, 3))))
    form = BlockForm(
        size=rng.randint(2, 9), markov=rng.choice((None, "vanilla", "gated", "rnn")), rank=rng.choice((3, 16)),
        layer=layer, num_layers=rng.choice((1, 2, 3)), tapped=taps, mask_id=rng.randrange(250),
        confidence=rng.random() < 0.5, fields=fields,
    )  # fmt: skip
    if layer == "qwen3" and rng.random() < 0.3:
        kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(form.num_layers)]
        form.fields |= {"layer_types": kinds, "use_sliding_window": True, "sliding_window": rng.randint(1, 12)}
    if rng.random() < 0.4:
        form.speculators, form.num_tokens = True, rng.choice((0, 101, 200))
        form.anchor = rng.choice((True, False)) if form.markov is None else rng.choice((True, False, None))
    return form


def _divide(fields: dict[str, Any]) -> None:
    """Makes sizes of a target even, which two ranks share."""
    heads = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    for name in (*heads, "intermediate_size", "moe_intermediate_size"):
        if name in fields:
            fields[name] *= 2
    if not {"head_dim", "kv_lora_rank"} & fields.keys():
        fields["hidden_size"] *= 2


def _draw_form(rng: random.Random, layers: int, of: dict[str, Any], ranks: str) -> Form:
    eagle3, layer = rng.random() < 0.7, rng.choice(("llama", "llama", "qwen2", "qwen3", "deepseek"))
    even = 2 if ranks in ("tp 2", "dp 2") else 1
    heads = even * rng.choice((1, 2, 3))
    fields: dict[str, Any] = {
        "num_attention_heads": heads * rng.choice((1, 2)), "num_key_value_heads": heads, "rms_norm_eps": 1e-5,
        "intermediate_size": even * rng.choice((20, 37, 96)), "rope_theta": rng.choice((1e4, 5e5)),
    }  # fmt: skip
    if layer == "deepseek":
        fields |= {
            "num_attention_heads": heads,
            "q_lora_rank": rng.choice((None, 24)),
            "v_head_dim": rng.choice((8, 20)),
        }
        fields |= {"kv_lora_rank": rng.choice((16, 36)), "rope_interleave": rng.random() < 0.7}
    else:
        fields["head_dim"] = rng.choice((8, 16, 24))
        kinds = [None, {"rope_type": "linear", "factor": 2.0}, random_shapes._rope(rng, layer)]
        fields["rope_scaling"] = rng.choice(kinds)
    if layer == "llama":
        fields |= {"attention_bias": rng.random() < 0.4, "mlp_bias": rng.random() < 0.3}
    taps = tuple(sorted(rng.sample(range(-1, layers), rng.randint(1, 3))))
    vocab = of["vocab_size"]
    own, several = rng.random() < 0.8, rng.random() < 0.2 and ranks != "dp 2"
    form = Form(eagle3=eagle3, layer=layer, fields=fields, num_layers=rng.choice((2, 3)) if several else 1, tapped=taps)
    if not eagle3:
        form.bias = rng.random() < 0.5
        form.token_map = tuple(sorted(rng.sample(range(vocab), 140))) if rng.random() < 0.4 else ()
        return form
    form.own_head, form.num_tokens = own, rng.choice((0, 101, 200)) if own else 0
    form.norms_residual, form.norms_states = rng.random() < 0.4, rng.random() < 0.4
    form.norms_joined, form.norms_output = rng.random() < 0.3, rng.random() < 0.3
    form.speculators = layer in ("llama", "qwen3") and rng.random() < 0.3
    return form


def check(drawn: Drawn, folder: Path, rng: random.Random) -> str:
    """What was compared. Raises AssertionError, and Refused where transformers does not load the target."""
    try:
        path = agreeing_checkpoint(drawn.kind, folder / "target", rng.randrange(1000), **drawn.fields)
        target = Target(path)
        head = reference(drawn.form, target, rng.randrange(1000))
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    prompts = [[rng.randrange(250) for _ in range(9 * i + 1)] for i in range(4)]
    head.distil([target.continued([*prompt, rng.randrange(250)], 32) for prompt in prompts[1:]], 40)
    written = head.write(folder / "head")
    flags: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 8}
    flags |= {"cpu_threads": 1, "skip_tokenizer_init": True}
    drafts: dict[str, Any] = {
        "speculative_algorithm": drawn.form.algorithm, "speculative_num_steps": drawn.depth,
        "speculative_draft_model_path": str(written), "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": drawn.depth + 1, "disable_overlap_schedule": True,
    }  # fmt: skip
    if isinstance(drawn.form, Form) and drawn.form.token_map:
        torch.save(list(drawn.form.token_map), written / "map.pt")
        drafts["speculative_token_map"] = str(written / "map.pt")
    with Engine(str(path), **flags, **drafts, **FORMS[drawn.ranks]) as engine:
        outputs: Any = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    accepted, wanted = [], []
    for prompt, output in zip(prompts, outputs):
        tokens = output["output_ids"]
        best = target.logits(target.states(prompt + tokens, ())).detach()[len(prompt) - 1 : -1]
        chosen = best.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gap = float(((best.max(-1).values - chosen) / best.abs().max()).max())
        assert gap < 1e-5, f"a token is worse than transformers' by {gap:.1e}"
        wanted.append(counts_of(head, prompt, tokens, drawn.depth)[1])
        accepted.append(output["meta_info"]["spec_num_correct_drafts"])
    counts = [sum(count) for count in wanted]
    assert accepted == counts, f"accepted {accepted}, wanted {counts}"
    return f"{sum(accepted)} drafts accepted"


def _compared(drawn: Drawn, folder: Path, rng: random.Random, seed: int) -> str:
    return f"{drawn.kind}, {drawn.ranks}: {check(drawn, folder, rng)}"


if __name__ == "__main__":
    random_shapes.run_draws(__doc__, [*TARGETS, *MORE_TARGETS], 20, draw, _compared)
