"""MTP layers equal transformers' own on random tiny checkpoints: whole, in chunks, token by token, in draft chains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config_file import load_model_config
from moe_engine.models.loader import LoadOptions, load_mtp
from tests.models import stepper
from tests.models.checkpoints import dequantized_copy, make_checkpoint
from tests.models.ling_v2_5 import LingReference, make_ling
from tests.models.rows import all_rows
from tests.models.sparse import clear_draw
from tests.models.stepper import Chunk, make_kv
from tests.models.test_parity import FP8_DIMS, assert_close

PROMPT_LENGTH = 90  # beyond YaRN's original 64, so that its bands matter
every_row = pytest.mark.parametrize("row", all_rows())
MakeOracle = Callable[..., "Oracle | Formulas"]
FAMILIES = {"deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe", "hy_v3": "HYV3", "ernie4_5_moe": "Ernie4_5_Moe"}
FAMILIES |= {"bailing_hybrid": "BailingHybrid"}
OWN_NAMES = ("hy_v3", "ernie4_5_moe", "bailing_hybrid")
"""Their MTP layers have names that transformers does not know."""
LING_V2_5 = "ling_v2_5"
every_family = pytest.mark.parametrize("kind", [*FAMILIES, LING_V2_5])


class Oracle:
    """transformers' model and MTP layers over a checkpoint, and a random sequence of `PROMPT_LENGTH` + 1 tokens."""

    def __init__(self, path: Path, plain: Path, seed: int, family: str = "DeepseekV3") -> None:
        import transformers
        from transformers.modeling_layers import MtpModel

        transformers.utils.logging.disable_progress_bar()
        model_class = getattr(transformers, f"{family}ForCausalLM")
        self.path = path
        first = load_model_config(path).num_layers
        with pytest.MonkeyPatch.context() as patch:
            # transformers recognizes MTP layers by this value: it supports only V3's layer 61
            patch.setattr(
                model_class, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.({first}|{first + 1})\..*"]
            )
            self._model = model_class.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
            self._mtp = MtpModel.from_pretrained(self._model)
        self._generator = torch.Generator().manual_seed(seed + 7)
        self.tokens, self.hidden = clear_draw(self._draw)

    @torch.no_grad()
    def _draw(self) -> tuple[list[int], Tensor]:
        """Tokens, and hidden states [T, D] before the last one; selections of the first MTP layer are seen too."""
        tokens = torch.randint(0, 256, (PROMPT_LENGTH + 1,), generator=self._generator).tolist()
        hidden = self._model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        self.layer(0, tokens[1:], hidden)
        return tokens, hidden

    @torch.no_grad()
    def layer(self, index: int, next_ids: list[int], hidden: Tensor) -> Tensor:
        """v [T, D] of a sequence from its start, without a cache."""
        positions = torch.arange(len(next_ids)).unsqueeze(0)
        ids = torch.tensor([next_ids])
        return self._mtp.forward_layer(index, hidden.unsqueeze(0), positions, None, input_ids=ids)[0]

    @torch.no_grad()
    def logits(self, v: Tensor, sizes: object = None) -> Tensor:
        return self._model.lm_head(v)


class Formulas:
    """The same in float64, of a model that transformers does not have."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = make_ling(path, seed, tokenizer=False, num_mtp_layers=1)
        self._reference = LingReference(path)
        generator = torch.Generator().manual_seed(seed + 7)
        self.tokens = torch.randint(0, 256, (PROMPT_LENGTH + 1,), generator=generator).tolist()
        self.hidden = self._reference.hidden(self.tokens[:-1])  # [T, D]

    def layer(self, index: int, next_ids: list[int], hidden: Tensor) -> Tensor:
        return self._reference.mtp(index, next_ids, hidden)

    def logits(self, v: Tensor, sizes: object = None) -> Tensor:
        return self._reference.head(v)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> MakeOracle:
    """oracle(num_mtp_layers=1, kind=..., **checkpoint options) -> Oracle, cached by its arguments."""
    made: dict[str, Oracle | Formulas] = {}

    def make(num_mtp_layers: int = 1, kind: str = "deepseek_v3", **options: Any) -> Oracle | Formulas:
        key = repr((num_mtp_layers, kind, sorted(options.items())))
        if key not in made and kind == LING_V2_5:
            made[key] = Formulas(tmp_path_factory.mktemp("mtp"), len(made))
        if key not in made:
            folder = tmp_path_factory.mktemp("mtp")
            path = make_checkpoint(kind, folder / "own", 3, num_mtp_layers=num_mtp_layers, **options)
            plain = dequantized_copy(path, folder / "plain") if options.get("fp8") else path
            if kind in OWN_NAMES:
                more = {"num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"], "mtp_layer_types": ["full_attention"]}
                plain = make_checkpoint(kind, folder / "plain", 3, num_mtp_layers=1, deepseek_names=True, **options)
                config = json.loads((plain / "config.json").read_text())
                (plain / "config.json").write_text(json.dumps(config | more))
            made[key] = Oracle(path, plain, len(made), FAMILIES[kind])
        return made[key]

    return make


class Drafter:
    """A model and its MTP layers over one KV pool."""

    def __init__(self, path: Path, row: str = "torch", dtype: str = "float32", **options: Any) -> None:
        self.main = stepper.load(path, row, dtype, **options)
        self.config = self.main.config
        load = LoadOptions(dtype, load_format=options.get("load_format", "auto"))
        self.mtp = load_mtp(path, self.config, self.main.model, load)
        slots = self.main.num_slots
        self.main.kv += make_kv(self.config, slots, getattr(torch, dtype), num_mtp_layers=self.mtp.num_layers)

    def batch(self, tokens: list[int], decode: bool = False, sequence: int = 0) -> ForwardBatch:
        return self.main.batch([Chunk(sequence, tokens, decode)])

    def step(self, tokens: list[int], start: int, stop: int, decode: bool = False, sequence: int = 0) -> Tensor:
        """Runs the model and the first MTP layer over tokens[start:stop]; returns v."""
        batch = self.batch(tokens[start:stop], decode, sequence)
        return self.draft(batch, tokens[start + 1 : stop + 1], self.main.model.forward(batch))

    def draft(self, batch: ForwardBatch, next_ids: list[int], hidden: Tensor, layer: int = 0) -> Tensor:
        before = hidden.clone()
        v = self.mtp.forward(layer, torch.tensor(next_ids), hidden, batch)
        assert torch.equal(hidden, before), "the hidden states were changed"
        return v


def check(drafter: Drafter, want: Oracle | Formulas, v: Tensor, expected: Tensor) -> None:
    assert_close(v, expected)
    assert_close(drafter.mtp.logits(v), want.logits(expected))


@every_row
@every_family
def test_whole_prompt(oracle: MakeOracle, kind: str, row: str) -> None:
    want = oracle(kind=kind)
    drafter = Drafter(want.path, row)
    v = drafter.step(want.tokens, 0, PROMPT_LENGTH)
    check(drafter, want, v, want.layer(0, want.tokens[1:], want.hidden))


@every_row
@every_family
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.each_value
def test_chunks_then_decode(oracle: MakeOracle, kind: str, row: str, page_size: int) -> None:
    """Chunks of other sizes, single tokens, several tokens at once as after a verification; another sequence in
    between."""
    want = oracle(kind=kind)
    options = {"max_expanded_tokens": 60} if kind == "deepseek_v3" else {}
    tokens, drafter = want.tokens, Drafter(want.path, row, page_size=page_size, seed=1, **options)
    got = []
    for start, stop, decode in ((0, 37, False), (37, 60, False), *((i, i + 1, True) for i in range(60, 75))):
        got.append(drafter.step(tokens, start, stop, decode))
        drafter.step(tokens[::-1], stop, stop + 2, sequence=1)
    got += [drafter.step(tokens, 75, 80, True), drafter.step(tokens, 80, PROMPT_LENGTH)]
    check(drafter, want, torch.cat(got), want.layer(0, tokens[1:], want.hidden))


@every_row
@every_family
def test_drafting_further_and_back(oracle: MakeOracle, kind: str, row: str) -> None:
    """v is the next hidden state; the model later overwrites the KV that drafting wrote after the sequence."""
    want = oracle(kind=kind)
    tokens, drafter = want.tokens, Drafter(want.path, row, seed=2)
    expected = want.layer(0, tokens[1:], want.hidden)
    got = [drafter.step(tokens, 0, 70)]
    for start, stop in ((70, 71), (71, 74), (74, PROMPT_LENGTH)):
        drafts = torch.randint(0, 256, (4,), generator=torch.Generator().manual_seed(start)).tolist()
        hidden, next_ids, v = want.hidden[:start], tokens[1 : start + 1], got[-1][-1:]
        for draft in drafts:
            hidden = torch.cat((hidden, want.layer(0, next_ids, hidden)[-1:]))
            next_ids = [*next_ids, draft]
            v = drafter.draft(drafter.batch([draft], decode=True), [draft], v)
            check(drafter, want, v, want.layer(0, next_ids, hidden)[-1:])
        drafter.main.lengths[0] = start
        got.append(drafter.step(tokens, start, stop, decode=True))
    check(drafter, want, torch.cat(got), expected)


@every_row
def test_second_layer(oracle: MakeOracle, row: str) -> None:
    """Layer 1 takes layer 0's output and the token after the next; each layer has its own cache."""
    want = oracle(num_mtp_layers=2)
    tokens, drafter = want.tokens, Drafter(want.path, row, seed=3)
    assert list(drafter.mtp.kv_layers) == [3, 4] and drafter.mtp.num_layers == 2
    first = want.layer(0, tokens[1:-1], want.hidden[:-1])
    got = []
    for start, stop, decode in ((0, 50, False), (50, 51, True), (51, PROMPT_LENGTH - 1, False)):
        batch = drafter.batch(tokens[start:stop], decode)
        v = drafter.draft(batch, tokens[start + 1 : stop + 1], drafter.main.model.forward(batch))
        assert_close(v, first[start:stop])
        got.append(drafter.draft(batch, tokens[start + 2 : stop + 2], v, layer=1))
    check(drafter, want, torch.cat(got), want.layer(1, tokens[2:], first))


@every_row
def test_fp8_blocks(oracle: MakeOracle, row: str) -> None:
    want = oracle(fp8=True, max_shard_bytes=150_000, **FP8_DIMS)
    drafter = Drafter(want.path, row)
    v = torch.cat((drafter.step(want.tokens, 0, 70), drafter.step(want.tokens, 70, PROMPT_LENGTH, decode=True)))
    check(drafter, want, v, want.layer(0, want.tokens[1:], want.hidden))


@every_row
def test_bfloat16_stays_near(oracle: MakeOracle, row: str) -> None:
    want = oracle()
    drafter = Drafter(want.path, row, "bfloat16")
    v = torch.cat((drafter.step(want.tokens, 0, 70), drafter.step(want.tokens, 70, PROMPT_LENGTH, decode=True)))
    expected = want.layer(0, want.tokens[1:], want.hidden)
    error = (v.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert v.dtype == torch.bfloat16 and error.median() < 0.05


@every_row
def test_empty_step(oracle: MakeOracle, row: str) -> None:
    """A rank without work still runs its step."""
    drafter = Drafter(oracle().path, row)
    batch = drafter.main.batch([])
    v = drafter.mtp.forward(0, batch.input_ids, drafter.main.model.forward(batch), batch)
    assert v.shape == (0, drafter.config.hidden_size)
    assert drafter.mtp.logits(v).shape == (0, drafter.config.vocab_size)
