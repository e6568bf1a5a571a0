"""Acceptance rate of a checkpoint's MTP drafts: ``python -m benchmarks.mtp_agreement PATH``.

Runs model and MTP layer directly over a batch of equally long sequences, without engine and scheduler: after every
greedy token the first MTP layer drafts a chain, each draft from the state of the previous one. Prints, for each
position of the chain, the share of correct drafts among those with all predecessors correct; and the expected tokens
per step of speculative decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.checkpoints import SPECIAL_TOKENS
from moe_engine.kernels.backends import plan_kernels
from moe_engine.kernels.device import cpu_device
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models.activation_dtype import activation_dtype
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config_file import load_model_config
from moe_engine.models.drafts.mtp import MTPLayers
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.models.loader import LoadOptions, load_model, load_mtp
from moe_engine.models.needs import need_of_model
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.kv_pool import KVPool, kv_spec
from moe_engine.worker.startup.kernel_choice import build_backends


@dataclass(frozen=True)
class Agreement:
    """Agreement of `drafts` chains. `rates[j]`: share of correct drafts at position j among those correct before j."""

    drafts: int
    rates: list[float]

    @property
    def tokens_per_step(self) -> float:
        """The model's own token and the drafts accepted with it, on average."""
        accepted, reached = 1.0, 1.0
        for rate in self.rates:
            reached *= rate
            accepted += reached
        return accepted


@torch.no_grad()
def measure(
    path: str | Path, chain: int = 4, sequences: int = 16, prompt_len: int = 16, num_tokens: int = 64, seed: int = 0
) -> Agreement:
    """Drafts `chain` tokens after each of `num_tokens` greedy tokens of random prompts.

    Raises:
        ConfigError: the checkpoint has no MTP layers. CheckpointError: it cannot be read.
    """
    batch_model = BatchModel(path, sequences, prompt_len + num_tokens + chain + 1)
    generator = torch.Generator().manual_seed(seed)
    vocab_size = batch_model.config.vocab_size
    prompts = torch.randint(len(SPECIAL_TOKENS), vocab_size, (sequences, prompt_len), generator=generator)
    next_ids, state = batch_model.advance(prompts)
    answers, drafted = [next_ids], []
    for _ in range(num_tokens):
        drafted.append(batch_model.draft(state, chain))
        next_ids, state = batch_model.advance(next_ids)
        answers.append(next_ids)
    answer, drafts = torch.cat(answers, dim=1), torch.stack(drafted[: num_tokens + 1 - chain])  # [B, N+1], [n, B, K]
    right = drafts == torch.stack([answer[:, i + 1 : i + 1 + chain] for i in range(len(drafts))])
    reached = right.cumprod(dim=2).flatten(0, 1).sum(dim=0).tolist()
    rates = [now / max(before, 1) for now, before in zip(reached, [right[..., 0].numel(), *reached])]
    return Agreement(right[..., 0].numel(), rates)


class BatchModel:
    """A model and its MTP layers over B sequences of the same length, each with its own pages of the KV pool."""

    def __init__(self, path: str | Path, sequences: int, max_len: int) -> None:
        self.config = config = load_model_config(path)
        name = activation_dtype(config)
        rates = (config.entry_parts(layer)[0] for layer in range(config.num_layers))
        page = math.lcm(*(rate for rate in rates if rate))
        need = need_of_model(config, name, page_size=page)
        self._backends = build_backends(plan_kernels(cpu_device(), need))
        options = LoadOptions(name)
        self._model: Any = cast(Any, load_model(path, config, options, self._backends, max_positions=max_len))
        if config.own_block is not None:
            raise SystemExit(f"{path}: its draft layers fill in blocks; this program measures chains of MTP layers")
        self._mtp = cast(MTPLayers, load_mtp(path, config, self._model, options))
        if self._mtp.reads_residual:
            self._model.taps = HiddenTaps((config.num_layers,))
        length = -(-max_len // page) * page
        spec = kv_spec(config, name, self._mtp.num_layers)
        self._kv = KVPool(spec, sequences * length, page, DeviceStream("cpu"), max_rows=sequences).layers
        self._page_size = page
        self._slots = page + torch.arange(sequences * length, dtype=torch.int32).view(sequences, length)
        self._length = 0

    def advance(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, n], the next tokens -> the greedy token after them [B, 1], and the MTP state there [B, D]."""
        batch = self._batch(ids, self._length)
        self._length += ids.shape[1]
        taps = self._model.taps
        hidden = self._model.forward(batch) if taps is None else taps.during(self._model.forward, batch)
        next_ids = _best(self._model, hidden.view(*ids.shape, -1)[:, -1])
        following = torch.cat((ids[:, 1:], next_ids), dim=1)
        states = self._mtp.prepare(hidden if taps is None else taps.take())
        state = self._mtp.forward(0, following.flatten(), states, batch)
        return next_ids, state.view(*ids.shape, -1)[:, -1]

    def draft(self, state: Tensor, count: int) -> Tensor:
        """[B, count]: a chain from the last state. The cache rows of drafts are overwritten later."""
        drafts = [_best(self._mtp, state)]
        for position in range(self._length, self._length + count - 1):
            batch = self._batch(drafts[-1], position)
            state = self._mtp.forward(0, batch.input_ids, state, batch)
            drafts.append(_best(self._mtp, state))
        return torch.cat(drafts, dim=1)

    def _batch(self, ids: Tensor, start: int) -> ForwardBatch:
        count, length = ids.shape
        stop = start + length
        queries = PagedQueries(
            query_lens=[length] * count,
            context_lens=[stop] * count,
            rows=torch.arange(count, dtype=torch.int32),
            query_starts=torch.arange(count + 1, dtype=torch.int32) * length,
            context_lens_device=torch.full((count,), stop, dtype=torch.int32),
            slot_table=self._slots,
            page_size=self._page_size,
        )
        attention = AttentionBatch(queries, None) if length == 1 else AttentionBatch(None, queries)
        plan: Any = self._backends.attention.plan(attention)
        return ForwardBatch(
            input_ids=ids.flatten(),
            positions=torch.arange(start, stop).repeat(count),
            slots=self._slots[:, start:stop].flatten().long(),
            logits_rows=torch.arange(count) * length + length - 1,
            attention=attention,
            attention_plan=plan,
            kv=self._kv,
        )


def _best(layers: Any, hidden: Tensor) -> Tensor:
    """The most likely tokens [B, 1], by the logits of the model or of its MTP layers."""
    best: Tensor = layers.logits(hidden.contiguous()).argmax(dim=-1, keepdim=True)
    return best


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("mtp_agreement", __doc__)
    parser.add_argument("path", help="a checkpoint directory with MTP layers")
    parser.add_argument("--chain", type=int, default=4, help="drafts after each token")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=16, help="random tokens at the start of each sequence")
    parser.add_argument("--num-tokens", type=int, default=64, help="greedy tokens of each sequence")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    found = measure(args.path, args.chain, args.sequences, args.prompt_len, args.num_tokens, args.seed)
    for position, rate in enumerate(found.rates, 1):
        print(f"draft {position}: {rate:.3f}")
    print(f"tokens per step: {found.tokens_per_step:.2f}  ({found.drafts} chains)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
