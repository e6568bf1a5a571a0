"""Ledger rows of drafters, and the activations of the largest step with them."""

from __future__ import annotations

import dataclasses

from moe_engine.models import sizes, step_memory
from moe_engine.models.eagle_config import LM_HEAD, HeadConfig, head_tensors
from moe_engine.models.tensors.model import TensorSpec
from moe_engine.planning.memory.ledger import DRAFT_WEIGHTS, LedgerRow
from moe_engine.planning.memory.sizing_input import SizingInput


def draft_rows(given: SizingInput) -> list[LedgerRow]:
    """Memory of the drafter: weights, and the model's hidden states from which the MTP layers start. MTP layers share
    embedding and LM head with the model."""
    model, size, topology = given.model, given.dtype_bytes, given.parallel.topology
    if given.uses_mtp:
        layers = model.num_nextn_predict_layers
        extra = sizes.weight_bytes(model, size, True, topology, format=given.weight_format)
        extra -= sizes.weight_bytes(model, size, topology=topology, format=given.weight_format)
        extra -= 2 * given.bf16_gates(mtp=True)
        number = count(sizes.num_parameters(model, include_mtp=True) - sizes.num_parameters(model))
        kind = "MTP" if model.own_block is None else "DSpark"
        shared = "embedding is" if model.mtp.own_heads else "embedding and head are"
        detail = f"{layers} {kind} layer{'s' * (layers > 1)}, {number} parameters; {shared} the model's"
        if model.own_block is not None:
            return [LedgerRow(DRAFT_WEIGHTS, extra, detail)]
        # states of each row's last token; with several layers also of earlier tokens, and a copy of these during an
        # update
        states = given.limits.running * (2 * layers - 1)
        tapped = 0
        if model.drafts_read_residual and given.graphs.sizes:
            tapped = given.graphs.up_to(given.limits.running).max_tokens
        num_bytes = (states + tapped) * model.draft_state_width * size
        kept = LedgerRow("draft states", num_bytes, f"{states} states of running requests")
        return [LedgerRow(DRAFT_WEIGHTS, extra, detail), kept]
    if given.uses_ngrams:
        if given.machine.on_cpu:
            texts, width = given.limits.running, given.limits.context_len
            num_bytes = width * (texts * step_memory.NGRAM_INDEX_BYTES + step_memory.NGRAM_HOST_BYTES)
            return [LedgerRow("n-gram search", num_bytes, f"{texts} texts x {width} positions, sorted by token")]
        places = step_memory.NGRAM_PLACES
        num_bytes = places * step_memory.NGRAM_PLACE_BYTES
        return [LedgerRow("n-gram search", num_bytes, f"{places} positions of texts compared at once")]
    if given.head is not None:
        return _head_rows(given, given.head)
    if given.draft is not None:
        detail = f"{count(sizes.num_parameters(given.draft))} parameters of {given.draft.architecture}"
        return [LedgerRow(DRAFT_WEIGHTS, sizes.weight_bytes(given.draft, size), detail)]
    return []


def step_bytes(given: SizingInput) -> int:
    """Activations of the largest step. A draft model runs when the model's activations are freed; its draft extend may
    cover the tokens of several steps. MTP layers read the model's hidden states."""
    limits, size = given.limits, given.dtype_bytes
    own = limits.forward_tokens
    tokens = own * given.parallel.topology.attn_dp_size
    step = step_memory.largest_step_activation_bytes(
        given.local_model, tokens, size, num_requests=limits.running, own_tokens=own
    )
    if given.head is not None and given.head.block is not None:
        # blocks are drafted before the model runs; the draft extend runs no layer
        blocks = step_memory.largest_step_activation_bytes(given.head.layer, tokens, size, num_requests=limits.running)
        return max(step + _extend_bytes(given, given.head, tokens), blocks)
    if given.head is not None:
        return step + _head_step_bytes(given, given.head, tokens)
    if given.draft is not None:
        unseen = min(step_memory.DRAFT_CATCH_UP, limits.running * limits.context_len)
        most = max(tokens, unseen)
        step = max(
            step, step_memory.largest_step_activation_bytes(given.draft, most, size, num_requests=limits.running)
        )
    if given.uses_mtp and given.model.own_block is not None:  # means of the streams, and the layers' input
        states = len(given.model.own_block.tapped) + 5
        return step + states * tokens * given.model.hidden_size * size
    # hidden states, and eh_proj's input; of streams the model's, a copy, and those of the MTP layer
    copied = given.model.mtp.reads_residual
    return step + given.uses_mtp * (3 + copied) * tokens * given.model.draft_state_width * size


def count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.1f} M"


def _head_rows(given: SizingInput, head: HeadConfig) -> list[LedgerRow]:
    """Rows of a draft head: its weights, the hidden states from which the drafts of an EAGLE head start, and those that
    captured steps store for it. With a token map it has a copy of rows of the model's LM head."""
    size, topology = given.dtype_bytes, given.parallel.topology
    specs = [*head_tensors(head)]
    if head.num_mapped:
        specs.append(TensorSpec(LM_HEAD, (head.num_mapped, head.layer.hidden_size)))
    ids = 8 * head.draft_vocab if head.draft_vocab != head.layer.vocab_size else 0
    layer = dataclasses.replace(
        head.layer, max_position_embeddings=given.limits.row_width
    )  # for the size of the rotary table
    num_bytes = ids + sizes.tensor_bytes(layer, specs, size, topology, format=head.layer.weight_format)
    number = count(sum(spec.num_elements for spec in specs))
    detail = f"{head.kind}, {number} parameters; drafts {head.draft_vocab} of {head.layer.vocab_size} tokens"
    running, tapped = given.limits.running, 0
    if head.tapped and given.graphs.sizes:
        tapped = given.graphs.up_to(running).max_tokens * head.num_states * head.target_hidden * size
    weights = LedgerRow(DRAFT_WEIGHTS, num_bytes, detail)
    if head.block is not None:
        return [weights, LedgerRow("draft states", tapped, "states of captured steps")] if tapped else [weights]
    states = running * head.layer.hidden_size * size
    return [weights, LedgerRow("draft states", states + tapped, f"{running} states of running requests")]


def _extend_bytes(given: SizingInput, head: HeadConfig, tokens: int) -> int:
    """The states that a draft extend reads, while the model's hidden states exist, and its layer's input."""
    states = tokens * head.num_states * head.target_hidden * (2 if head.norms_states else 1)
    return (states + 5 * tokens * head.layer.hidden_size) * given.dtype_bytes


def _head_step_bytes(given: SizingInput, head: HeadConfig, tokens: int) -> int:
    """Activations of an EAGLE head's draft extend, with what layers before the last compute."""
    own = _extend_bytes(given, head, tokens)
    if head.layer.num_layers == 1:
        return own
    return own + step_memory.largest_step_activation_bytes(head.layer, tokens, given.dtype_bytes)
