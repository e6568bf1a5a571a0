"""The MTP layer of GLM-5.3-Flash: against transformers' attention and experts, with the formula of DeepSeek-V3's report
around them (transformers has no MTP for this model)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.planning.prepare import prepare
from tests.models import sparse
from tests.models.checkpoints import POOLED, make_checkpoint
from tests.models.published import GLM_5_3_FLASH
from tests.models.rows import all_rows
from tests.models.test_config import parse
from tests.models.test_mtp import Drafter
from tests.models.test_parity import assert_close

LENGTH = 60
TREE = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
every_row = pytest.mark.parametrize("row", all_rows())


class Oracle:
    """transformers' model, the modules of a layer more, and a text with clear selections."""

    def __init__(self, path: Path) -> None:
        import transformers

        self.path, self.tensors = path, load_file(path / "model.safetensors")
        config = transformers.AutoConfig.from_pretrained(path)
        text = config.text_config
        self.first, self.eps = text.num_hidden_layers, text.rms_norm_eps
        text.num_hidden_layers += 1
        for name in ("mlp_layer_types", "layer_types", "indexer_types"):
            kinds = list(getattr(text, name))
            setattr(text, name, [*kinds, kinds[-1]])
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(path, config=config, dtype=torch.float32, attn_implementation="eager")
        self.model = model.model.language_model
        self.layer = self.model.layers[self.first]
        self.model.config.num_hidden_layers = self.first
        self.tokens, self.v = sparse.clear_draw(self._draw, 5e-6)

    @torch.no_grad()
    def _draw(self) -> tuple[list[int], Tensor]:
        tokens = torch.randint(0, 256, (LENGTH + 1,)).tolist()
        return tokens, self._mtp(tokens[1:], self.model(torch.tensor([tokens[:-1]])).last_hidden_state[0])

    def _mtp(self, next_ids: list[int], hidden: Tensor) -> Tensor:
        """v [T, D] of a text from its start."""
        embedding = self._tensor("embed_tokens.weight")[next_ids]
        both = torch.cat((self._norm("enorm", embedding), self._norm("hnorm", hidden)), -1)
        z = both @ self._tensor(f"layers.{self.first}.eh_proj.weight").T
        seen, x = torch.ones(1, len(z), dtype=torch.bool), self._norm("input_layernorm", z)
        z = z + self.layer.self_attn(x[None], attention_mask=seen)[0][0]
        z = z + self.layer.mlp(self._norm("post_attention_layernorm", z)[None])[0]
        return self._norm("shared_head.norm", z)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._tensor(f"layers.{self.first}.{name}.weight")
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[f"model.language_model.{name}"]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    path = tmp_path_factory.mktemp("mtp") / "model"
    return Oracle(make_checkpoint(POOLED, path, 5, num_mtp_layers=1, tokenizer=False))


@every_row
def test_equals_transformers(oracle: Oracle, row: str) -> None:
    """A whole text; chunks and decodes that end within pools, below and beyond the selected ones."""
    tokens = oracle.tokens
    assert_close(Drafter(oracle.path, row, page_size=4).step(tokens, 0, LENGTH), oracle.v)
    drafter, got = Drafter(oracle.path, row, seed=1, page_size=8), []
    for start, stop, decode in ((0, 5, False), (5, 30, False), (30, 31, True), (31, 34, True), (34, LENGTH, False)):
        got.append(drafter.step(tokens, start, stop, decode))
    assert_close(torch.cat(got), oracle.v)


@every_row
def test_remembered_tokens(oracle: Oracle, row: str) -> None:
    """`remember` writes latents, index keys and keys of pools as `forward` does."""
    drafter, tokens = Drafter(oracle.path, row, page_size=4), oracle.tokens
    batch = drafter.batch(tokens[:38])
    drafter.mtp.remember(0, torch.tensor(tokens[1:39]), drafter.main.model.forward(batch), batch)
    assert_close(drafter.step(tokens, 38, LENGTH), oracle.v[38:])


def test_headers_and_sizes(oracle: Oracle, tmp_path: Path) -> None:
    """The layer's tensors are known, with and without copies of embedding and head; the layer takes the ledger's
    memory."""
    config = load_model_config(oracle.path)
    check_headers(oracle.path, read_checkpoint(oracle.path), config, include_mtp=True)
    mtp: Any = Drafter(oracle.path, page_size=4).mtp
    extra = sizes.weight_bytes(config, 4, True) - sizes.weight_bytes(config, 4)
    assert mtp.weight_bytes == pytest.approx(extra, rel=0.02) and config.draft_state_width == config.hidden_size
    published = parse(tmp_path, GLM_5_3_FLASH)
    own = sizes.num_parameters(published, include_mtp=True) - sizes.num_parameters(published)
    assert own == pytest.approx(7.5e9, rel=0.03)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (TREE, "layers with a state for each request need chains; use --speculative-eagle-topk 1"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3: not available yet: .* use auto"),
        ({"page_size": 2}, "--page-size 2: .* has entries of 4 tokens; use a multiple of it"),
        (
            {"enable_lora": True, "lora_target_modules": ["all"], "max_lora_rank": 8},
            "--enable-lora, --lora-paths: not available yet",
        ),
        ({"enable_torch_compile": True}, "--enable-torch-compile: not available yet"),
    ],
)
def test_refused_flags(oracle: Oracle, flags: dict[str, Any], message: str) -> None:
    """Beside drafts of the MTP layer; without these flags they are planned."""
    common: dict[str, Any] = {"model_path": str(oracle.path), "device": "cpu", "speculative_algorithm": "NEXTN"}
    common |= {"skip_tokenizer_init": True}
    assert prepare(EngineArgs.from_kwargs(**common)).model.num_nextn_predict_layers == 1
    with pytest.raises(ConfigError, match=message):
        prepare(EngineArgs.from_kwargs(**common | flags))
