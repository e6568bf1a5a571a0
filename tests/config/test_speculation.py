"""Speculative flags: SGLang's spellings and automatic values, memory cost, refusals that name the fix."""

from __future__ import annotations

import json

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models import sizes, step_memory
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.output.explain import explain_json
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolve import resolve
from moe_engine.planning.speculation.resolve_speculation import DraftModel
from tests.config.conftest import GB, SMALL, machine
from tests.models.published import V3

NO_MTP = {**SMALL, "num_nextn_predict_layers": 0}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": SMALL["vocab_size"],
    "max_position_embeddings": 4096, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


def tree(config):
    found = config.speculation
    return found.method, found.num_steps, found.topk, found.num_draft_tokens, found.auto_depth


def reasons(config):
    return {decision.name: decision.reason for decision in config.decisions}


@pytest.fixture
def standalone(model_dir):
    """Resolves SMALL with a draft model of the given config.json."""

    def make(draft=LLAMA, on=None, **flags):
        folder, drafter = model_dir(SMALL), model_dir(draft, name="draft")
        args = EngineArgs.from_kwargs(
            speculative_algorithm="STANDALONE", speculative_draft_model_path=str(drafter), **flags
        )
        found = DraftModel(str(drafter), load_model_config(drafter))
        return resolve(args, load_model_config(folder), on or machine(), model_path=str(folder), draft=found)

    return make


def test_left_out_means_no_drafts(resolved):
    config = resolved()
    assert config.speculation is None and config.draft_model is None and "speculation" not in config.flat()
    assert resolved(speculative_num_steps=0, speculative_num_draft_tokens=0).speculation is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("nextn", 3, 1, 4, False)),
        ({"speculative_algorithm": "EAGLE"}, ("nextn", 3, 1, 4, False)),
        ({"speculative_algorithm": "nextn"}, ("nextn", 3, 1, 4, False)),
        ({"speculative_num_steps": "auto"}, ("nextn", 6, 1, 7, True)),
        ({"speculative_num_steps": "AUTO", "speculative_num_draft_tokens": 8}, ("nextn", 7, 1, 8, True)),
        (
            {"speculative_num_steps": 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2},
            ("nextn", 1, 1, 2, False),
        ),
        (
            {"speculative_num_steps": "5", "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16},
            ("nextn", 5, 4, 16, False),
        ),
        ({"speculative_algorithm": "NGRAM"}, ("ngram", 4, 1, 5, False)),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 12}, ("ngram", 11, 1, 12, False)),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 6}, ("ngram", 6, 1, 7, False)),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": "auto"}, ("ngram", 6, 1, 7, True)),
    ],
)
def test_trees(resolved, flags, expected):
    config = resolved(**{"speculative_algorithm": "NEXTN", **flags})
    assert tree(config) == expected
    flat = config.flat()
    assert flat["speculative_num_steps"] == expected[1] and flat["speculative_num_draft_tokens"] == expected[3]
    assert flat["speculation"]["auto_depth"] is expected[4] and json.dumps(flat)
    decided, given = reasons(config), {name for name in flags if name != "speculative_algorithm"}
    for name in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"):
        assert (name in decided) or name in given, name
    shown = explain_json(config)["values"]
    assert shown["speculative_num_draft_tokens"]["value"] == expected[3]


def test_a_chain_has_steps_plus_one_tokens(resolved):
    config = resolved(
        speculative_algorithm="NEXTN", speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=9
    )
    assert tree(config) == ("nextn", 3, 1, 4, False)
    assert any("--speculative-num-draft-tokens is 4, not 9" in note for note in config.notes)


def test_ngram_window_and_thresholds(resolved):
    config = resolved(
        speculative_algorithm="NGRAM",
        speculative_ngram_min_match_window_size=2,
        speculative_ngram_max_match_window_size=5,
        speculative_accept_threshold_single=0.9,
        speculative_accept_threshold_acc=0.8,
    )
    found = config.speculation
    assert (found.ngram_min_match, found.ngram_max_match) == (2, 5)
    assert (found.accept_threshold_single, found.accept_threshold_acc) == (0.9, 0.8)
    assert sum("not lossless" in note for note in config.notes) == 2


NEXTN, NGRAM = {"speculative_algorithm": "NEXTN"}, {"speculative_algorithm": "NGRAM"}


def shape(steps, topk, tokens):
    return {
        **NEXTN,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": tokens,
    }


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        (SMALL, {"speculative_num_steps": 3}, ["--speculative-num-steps 3 needs --speculative-algorithm"]),
        (SMALL, {"speculative_draft_model_path": "x"}, ["-model-path x needs --speculative-algorithm"]),
        (SMALL, {"speculative_accept_threshold_acc": 0.5}, ["needs --speculative-algorithm"]),
        (NO_MTP, NEXTN, ["NEXTN", "num_nextn_predict_layers is 0", "NGRAM", "config.json"]),
        (LLAMA, NEXTN, ["num_nextn_predict_layers is 0"]),
        (SMALL, {"speculative_algorithm": "STANDALONE"}, ["needs --speculative-draft-model-path"]),
        (SMALL, {**NGRAM, "speculative_draft_model_path": "x"}, ["NGRAM drafts from the text", "drop the path"]),
        (SMALL, {**NGRAM, "speculative_eagle_topk": 2}, ["--speculative-eagle-topk 2 with NGRAM", "use 1"]),
        (SMALL, {**NGRAM, "speculative_ngram_min_match_window_size": 0}, ["at least 1"]),
        (SMALL, {**NGRAM, "speculative_ngram_min_match_window_size": 20}, ["20", "--speculative-ngram-max", "12"]),
        (SMALL, {**NEXTN, "speculative_ngram_max_match_window_size": 4}, ["is for NGRAM"]),
        (SMALL, {**NEXTN, "speculative_num_steps": 3}, ["topk and --speculative-num-draft", "steps 3 ", "tokens 4"]),
        (SMALL, {**NEXTN, "speculative_num_draft_tokens": 6}, ["--speculative-num-steps 5 ", "tokens 6 draft a chain"]),
        (SMALL, {**NEXTN, "speculative_eagle_topk": 1}, ["--speculative-num-steps and"]),
        (SMALL, {**NEXTN, "speculative_num_steps": "auto", "speculative_eagle_topk": 2}, ["auto", "use topk 1"]),
        (SMALL, shape(3, 0, 4), ["--speculative-eagle-topk 0"]),
        (SMALL, shape(0, 1, 4), ["--speculative-num-steps 0", "leave out --speculative-algorithm"]),
        (SMALL, shape(3, 4, 65), ["--speculative-num-draft-tokens 65", "at most 64"]),
        (SMALL, shape(64, 1, 4), ["--speculative-num-steps 64", "at most 63"]),
        (SMALL, shape(3, 1, 1), ["--speculative-num-draft-tokens 1", "at least 2"]),
        (SMALL, shape(2, 2, 8), ["2 steps of topk 2 have at most 7", "use 7"]),
        (SMALL, {**NEXTN, "speculative_accept_threshold_single": 0}, ["threshold-single 0", "at most 1"]),
        (SMALL, {**NEXTN, "speculative_accept_threshold_acc": 1.5}, ["threshold-acc 1.5"]),
        (SMALL, {**NEXTN, "speculative_simulated_accept_length": 4.5}, ["accept-length 4.5", "at most 4"]),
        (SMALL, {**NEXTN, "speculative_simulated_accept_length": 0.5}, ["accept-length 0.5", "at least 1"]),
        (SMALL, {"speculative_simulated_accept_length": 2.0}, ["needs --speculative-algorithm"]),
        (SMALL, {**NEXTN, "speculative_num_steps": "many"}, ["--speculative-num-steps many"]),
        (SMALL, {**NEXTN, "speculative_num_steps": -1}, ["--speculative-num-steps -1"]),
        (SMALL, {"speculative_algorithm": "EAGLE3"}, ["EAGLE3 needs an EAGLE-3 head for", "NEXTN the MTP layers"]),
        (LLAMA, {"speculative_algorithm": "DSPARK"}, ["DSPARK needs a DSpark head for", "NGRAM the text"]),
        (SMALL, {**NEXTN, "speculative_token_map": "f.pt"}, ["--speculative-token-map f.pt", "an EAGLE head"]),
    ],
)
def test_refusals(resolved, model, flags, words):
    with pytest.raises(ConfigError) as refusal:
        resolved(model, **flags)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


# -- draft models


def test_draft_model(standalone):
    config = standalone()
    assert tree(config) == ("standalone", 3, 1, 4, False)
    assert config.draft_model is not None and config.draft_model.architecture == "LlamaForCausalLM"
    assert config.speculation.draft_model_path.endswith("draft")
    row = next(row for row in config.ledger.rows if row.name == "draft weights")
    assert row.num_bytes == sizes.weight_bytes(config.draft_model, 2) and "LlamaForCausalLM" in row.detail
    assert config.ledger.bytes_per_token == (4 * (64 + 16) + 2 * 2 * 2 * 16) * 2
    with pytest.raises(ConfigError, match=r"vocabulary of 1300 tokens.*has 1280"):
        standalone({**LLAMA, "vocab_size": 1300})
    with pytest.raises(ConfigError, match="--context-length 512"):
        standalone({**LLAMA, "max_position_embeddings": 512})
    assert standalone({**LLAMA, "max_position_embeddings": 512}, context_length=512).speculation is not None


def test_draft_paths(model_dir, tmp_path):
    folder = str(model_dir(SMALL))

    def start(algorithm, path):
        flags = {"model_path": folder, "load_format": "dummy", "speculative_algorithm": algorithm}
        return prepare(EngineArgs.from_kwargs(**flags, speculative_draft_model_path=str(path)), machine())

    config = start("STANDALONE", model_dir(LLAMA, name="draft"))
    assert config.draft_model is not None and config.speculation.draft_model_path == str(tmp_path / "draft")
    own = start("EAGLE", folder)
    assert own.draft_model is None and own.speculation.draft_model_path is None
    with pytest.raises(ConfigError, match="--speculative-draft-model-path /no/such: no such folder"):
        start("STANDALONE", "/no/such")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--speculative-draft-model-path .*no config\.json"):
        start("STANDALONE", tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"a complete model; .*MTP layer exported on its own"):
        start("NEXTN", model_dir(SMALL, name="other"))


# -- memory


def rows_of(config):
    return {row.name: row for row in config.ledger.rows}


def test_mtp_layer_is_counted(resolved):
    large = machine(1800, 2048)
    plain, drafting = resolved(V3, on=large), resolved(V3, on=large, **NEXTN)
    assert drafting.ledger.bytes_per_token == 70272 + 1152
    extra = rows_of(drafting)["draft weights"]
    assert extra.num_bytes == pytest.approx(2 * 11.6e9, rel=0.01) and "1 MTP layer" in extra.detail
    assert drafting.ledger.weight_bytes == plain.ledger.weight_bytes + extra.num_bytes
    assert "512 rows of 129280 at once, of up to 1024" in rows_of(drafting)["logits and sampling"].detail
    assert rows_of(drafting)["draft states"].num_bytes == 256 * 7168 * 2
    assert drafting.max_running_requests == plain.max_running_requests == 256
    assert "SGLang's 48" in reasons(drafting)["max_running_requests"]


def test_largest_step_grows_with_drafts(resolved):
    flags = {"max_running_requests": 256, "chunked_prefill_size": 512}
    assert "a step of 512 tokens" in rows_of(resolved(**flags))["activations"].detail
    assert "a step of 1024 tokens" in rows_of(resolved(**flags, **NGRAM, speculative_num_steps=3))["activations"].detail
    mixed = resolved(**flags, **NEXTN, enable_mixed_chunk=True)
    assert "a step of 1024 tokens" in rows_of(mixed)["activations"].detail
    assert "draft weights" not in rows_of(resolved(**NGRAM))


def test_refusal_offers_to_disable_speculation(resolved):
    at_least = resolved(V3, on=machine(1800, 2048)).ledger.weight_bytes / GB
    flags = {"max_running_requests": 1, "chunked_prefill_size": 128, "context_length": 1024}
    with pytest.raises(ConfigError, match="no --speculative-algorithm") as refusal:
        resolved(V3, on=machine((at_least + 18) / 0.8, 4096), **flags, **NEXTN)
    assert "draft weights" in str(refusal.value)


def test_tables_hold_tokens_too(resolved):
    plain, drafting = (rows_of(resolved(**flags))["slot tables"].num_bytes for flags in ({}, NGRAM))
    assert 2 * plain < drafting < 2.1 * plain


def test_the_draft_extend_of_a_draft_model_is_counted(standalone, model_dir):
    """A draft extend covers the prompts of several steps at once, up to 4,096 tokens, even if the model's steps are
    small."""
    small, large = (
        rows_of(standalone(chunked_prefill_size=chunk, max_running_requests=8))["activations"].num_bytes
        for chunk in (16, 4096)
    )
    draft = load_model_config(model_dir(LLAMA, name="draft"))
    assert small >= step_memory.largest_step_activation_bytes(draft, 4096, 2)
    assert large >= small


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_of_prompt_lookup(resolved, device):
    """On the host an index of each text and scratch memory for one text; on an accelerator a fixed number of
    positions."""
    on = machine(60, 80, device)
    few, many = (
        rows_of(resolved(on=on, max_running_requests=running, context_length=2048, **NGRAM))["n-gram search"]
        for running in (8, 512)
    )
    expected = [2048 * (8 * running + 40) if device == "cpu" else 48 << 20 for running in (8, 512)]
    assert [few.num_bytes, many.num_bytes] == expected


def test_experts_of_a_pass_are_counted(resolved):
    flags = {"expert_distribution_recorder_mode": "stat", "chunked_prefill_size": 512}
    row = rows_of(resolved(**flags))["experts of a pass"]
    assert row.num_bytes == 12 * 512 * 4 * 4 and "512 tokens x 4 layers x 4 experts" in row.detail
    assert "experts of a pass" not in rows_of(resolved())


def test_trees_and_determinism_exclude_each_other(resolved):
    tree_flags = {**NEXTN, "speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    with pytest.raises(ConfigError, match=r"--speculative-eagle-topk 2 with --enable-deterministic-inference"):
        resolved(enable_deterministic_inference=True, **tree_flags)
    assert resolved(enable_deterministic_inference=True, **NEXTN).speculation is not None
