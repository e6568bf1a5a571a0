"""The MTP layer of a sparse model, with its own indexer: against transformers' decoder layer of that index, with
the formula of DeepSeek-V3's report around it (transformers has no MTP for these models)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.models.layers.attention.sparse_chunks import SharedSelection
from tests.models import sparse
from tests.models.checkpoints import SPARSE_KINDS, make_checkpoint
from tests.models.rows import all_rows
from tests.models.test_mtp import Drafter
from tests.models.test_parity import assert_close

LENGTH = 60
every_row = pytest.mark.parametrize("row", all_rows())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Oracle:
    """transformers' layers, with the MTP layer after the last, and a text with clear selections."""

    def __init__(self, path: Path) -> None:
        import transformers

        self.path, self.tensors = path, load_file(path / "model.safetensors")
        config = transformers.AutoConfig.from_pretrained(path)
        self.first = config.num_hidden_layers
        config.num_hidden_layers += 1
        for name in ("mlp_layer_types", "layer_types", "indexer_types"):
            if getattr(config, name, None):
                kinds = list(getattr(config, name))
                last = "full" if name == "indexer_types" else kinds[-1]
                setattr(config, name, [*kinds[: self.first], last])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        self.layer, self.model = model.model.layers[self.first], model.model
        self.model.config.num_hidden_layers = self.first
        generator = torch.Generator().manual_seed(1)
        for _ in range(50):
            self.tokens = torch.randint(0, 256, (LENGTH + 1,), generator=generator).tolist()
            margins: list[Tensor] = []
            with sparse.observed(margins, LENGTH), torch.no_grad():
                hidden = self.model(torch.tensor([self.tokens[:-1]])).last_hidden_state[0]
                self.v = self.mtp(self.tokens[1:], hidden)
            if torch.stack(margins).min() > sparse.MARGIN:
                return
        raise AssertionError("no text with clear selections in 50 draws")

    def mtp(self, next_ids: list[int], hidden: Tensor) -> Tensor:
        """v [T, D] of a text from its start."""
        prefix, eps = f"model.layers.{self.first}", self.model.config.rms_norm_eps
        embedding = self.tensors["model.embed_tokens.weight"][next_ids]
        both = [
            rms_norm(x, self.tensors[f"{prefix}.{name}.weight"], eps)
            for name, x in (("enorm", embedding), ("hnorm", hidden))
        ]
        z = (torch.cat(both, -1) @ self.tensors[f"{prefix}.eh_proj.weight"].T)[None]
        positions = torch.arange(len(next_ids))[None]
        mask = torch.full((len(next_ids),) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
        rotary = self.model.rotary_emb(z, positions)
        out = self.layer(z, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        out = out[0] if isinstance(out, tuple) else out
        return rms_norm(out.view(len(next_ids), -1), self.tensors[f"{prefix}.shared_head.norm.weight"], eps)


@pytest.fixture(scope="module", params=SPARSE_KINDS[:2])
def oracle(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    path = tmp_path_factory.mktemp("model") / "model"
    return Oracle(make_checkpoint(request.param, path, 5, num_mtp_layers=1, tokenizer=False))


@every_row
def test_equals_transformers(oracle: Oracle, row: str) -> None:
    tokens = oracle.tokens
    assert_close(Drafter(oracle.path, row).step(tokens, 0, LENGTH), oracle.v)
    drafter, got = Drafter(oracle.path, row, seed=1, page_size=4), []
    for start, stop, decode in ((0, 5, False), (5, 30, False), (30, 31, True), (31, 34, True), (34, LENGTH, False)):
        got.append(drafter.step(tokens, start, stop, decode))
    assert_close(torch.cat(got), oracle.v)


@every_row
def test_remembered_tokens(oracle: Oracle, row: str) -> None:
    """`remember` writes latents and index keys as `forward` does."""
    drafter, tokens = Drafter(oracle.path, row), oracle.tokens
    batch = drafter.batch(tokens[:40])
    drafter.mtp.remember(0, torch.tensor(tokens[1:41]), drafter.main.model.forward(batch), batch)
    assert_close(drafter.step(tokens, 40, LENGTH), oracle.v[40:])


def test_later_draft_steps_use_the_first_selection(oracle: Oracle) -> None:
    """Later draft steps also write their own index keys. A step within the top-k does not determine the selection of
    others."""
    tokens, drafter = oracle.tokens, Drafter(oracle.path)
    drafter.step(tokens, 0, 30)
    shared = SharedSelection()
    first, second = (drafter.main.model.step_args(drafter.batch([t], decode=True))[1] for t in (1, 2))
    assert shared.apply(first) is first
    (later,) = shared.apply(second)
    assert later.selected is first[0].selected and not later.selects and second[0].selects
    other, short = SharedSelection(), Drafter(oracle.path)
    within = short.main.model.step_args(short.batch([1, 2, 3], decode=True))[1]
    assert other.apply(within) is within and other.apply(second) is second
    drafter.main.lengths[0] = 30
    batch = drafter.batch([5], decode=True)
    hidden = drafter.main.model.forward(batch)
    ids = torch.tensor([7])
    alone = drafter.mtp.forward(0, ids, hidden, batch)
    selection = SharedSelection()
    assert torch.equal(drafter.mtp.forward(0, ids, hidden, batch, selection), alone)
    assert torch.equal(drafter.mtp.forward(0, ids, hidden, batch, selection), alone)
