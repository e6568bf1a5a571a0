"""Embedding and head (vocabulary parallel on many ranks).

Legend: T tokens, S rows, D hidden, V vocabulary, W rows of the vocabulary on a rank, N rows of all groups, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.linear.protocol import LinearKernel, PreparedLinear
from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.quantization.codes import GroupCodes, PlainWeight
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import ModelConfig
from moe_engine.models.formats.online import derived_codes
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.layers.linear import Linear, Projection, format_for, load_linear, quantized_values
from moe_engine.models.tensors.model import HEAD_BIAS
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.context import SINGLE, ParallelContext
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.uneven import exchange_columns, gather_rows, sum_over

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head"


class Embedding:
    """ids [T] -> [T, D], new memory (the residual stream is added to in place)."""

    def __init__(
        self, config: ModelConfig, reader: WeightSource, ops: Ops, parallel: ParallelContext = SINGLE,
        name: str = EMBEDDING,
    ) -> None:  # fmt: skip
        self._group = parallel.attn_tp
        self.weight = load_vocabulary(partial(reader.tensor, name), reader, table_shape(config), self._group)  # [W, D]
        self._first = self._group.rank * len(self.weight)
        self._lookup = ops.capabilities.lookup
        all_reduce = parallel.all_reduce  # of all ranks, as one attention group is
        self._sum = partial(sum_over, self._group) if all_reduce is None else all_reduce.sum

    def __call__(self, ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return F.embedding(ids, self.weight)
        if self._lookup is not None:
            return self._sum(self._lookup(ids, self.weight, self._first))
        local = ids - self._first
        held = local.clamp(0, len(self.weight) - 1)
        rows = F.embedding(held, self.weight)
        return self._sum(rows.masked_fill_((local != held).unsqueeze(1), 0))


class Head:
    """hidden [S, D] -> logits [S, V] float32. A tied head shares the embedding's memory if its kernel allows.

    `name` is its tensor's, without ``.weight``. The vocabulary is sharded over all ranks, or inside an attention group
    (`enable_dp_lm_head`). Over all ranks, each rank multiplies the rows of all groups by its part, and each group gets
    its own rows back. Logits have the factor and the bound of `ModelConfig`.
    """

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightSource,
        kernel: LinearKernel,
        embedding: Embedding,
        parallel: ParallelContext = SINGLE,
        name: str = LM_HEAD,
    ) -> None:
        self._name, self._is_tied = name, config.tie_word_embeddings and name == LM_HEAD
        self._spans = parallel.attn_dp_size > 1 and not parallel.topology.enable_dp_lm_head
        self._group = parallel.world if self._spans else parallel.attn_tp
        self._repeats = parallel.attn_tp_size
        self._vocab_size, self._scale, self._cap = config.vocab_size, config.logit_scale, config.logit_cap
        self._has_bias = config.head_bias and name == LM_HEAD
        self._linear = self._as_stored(config, reader, kernel) or head_linear(
            kernel,
            self._load(config, reader, embedding),
            None if self._is_tied else derived_codes(reader.format, config.hidden_size, is_head=True),
            self._load_bias(config, reader),
        )

    def _as_stored(self, config: ModelConfig, reader: WeightSource, kernel: LinearKernel) -> Linear | None:
        """The head in the checkpoint's form, if the files say that it has one and the kernel multiplies it."""
        format, shape = reader.format, (config.vocab_size, config.hidden_size)
        if self._is_tied or not isinstance(format, SchemeFormat) or not format.stores_head:
            return None
        if (
            self._group.size > 1
            or format_for(kernel.capabilities.quantized, reader, [Projection(self._name, shape)]) is None
        ):
            return None
        return load_linear(kernel, reader, [self._name], shape[:1], shape[1], self._has_bias)

    def _load(self, config: ModelConfig, reader: WeightSource, embedding: Embedding) -> Tensor:
        if not self._is_tied:
            return load_vocabulary(partial(reader.linear, self._name), reader, table_shape(config), self._group)
        if self._spans:  # sharded differently from the embedding
            return load_vocabulary(partial(reader.tensor, EMBEDDING), reader, table_shape(config), self._group)
        return embedding.weight

    def _load_bias(self, config: ModelConfig, reader: WeightSource) -> Tensor | None:
        if not self._has_bias:
            return None
        return load_vocabulary(partial(reader.tensor, HEAD_BIAS), reader, table_shape(config)[:1], self._group)

    @property
    def weight(self) -> PreparedLinear:
        """This rank's rows of the vocabulary."""
        return self._linear.weight

    def __call__(self, hidden: Tensor, step: StepSizes | None = None, out: Tensor | None = None) -> Tensor:
        """`out`: memory for the result, contiguous, without a cap also in the dtype of hidden, to which the product is
        rounded; None: new memory."""
        logits = self._logits(hidden, step, out)
        if self._scale != 1.0:
            logits.mul_(self._scale)
        return logits.div_(self._cap).tanh_().mul_(self._cap) if self._cap else logits

    def _logits(self, hidden: Tensor, step: StepSizes | None, out: Tensor | None) -> Tensor:
        if self._group.size == 1:
            return self._linear(hidden).float() if out is None else self._linear.into(hidden, out)
        parts = self._of_all(hidden, step) if self._spans else self._of_group(hidden)
        _, rows, width = parts.shape
        if out is None:
            out = torch.empty(rows, self._vocab_size, dtype=torch.float32, device=parts.device)
        whole, rest = divmod(self._vocab_size, width)  # the last ranks may have padding
        ordered, end = parts.transpose(0, 1), whole * width
        out[:, :end].unflatten(1, (whole, width)).copy_(ordered[:, :whole])  # order and dtype in one pass over memory
        if rest:
            out[:, end:].copy_(ordered[:, whole, :rest])
        return out

    def _of_group(self, hidden: Tensor) -> Tensor:
        """[R, S, W]."""
        if not len(hidden):
            return hidden.new_empty(1, 0, self._vocab_size)
        return self._group.all_gather(self._linear(hidden))

    def _of_all(self, hidden: Tensor, step: StepSizes | None) -> Tensor:
        """[R, S, W]."""
        if step is None:
            raise ValueError(
                "the head is sharded over several attention groups: logits needs the step's sizes; or "
                "--enable-dp-lm-head"
            )
        if not any(step.logits):
            return hidden.new_empty(1, 0, self._vocab_size)
        all_rows = gather_rows(self._group, hidden[step.own_logits], step.logit_shares)  # [N, D]
        columns = self._linear(all_rows)  # [N, W]
        if self._repeats > 1:  # every rank of a group gets the group's rows
            columns = torch.cat([rows for rows in columns.split(list(step.logits)) for _ in range(self._repeats)])
        return exchange_columns(self._group, columns, _repeat(step.logits, self._repeats))


def head_linear(kernel: LinearKernel, weight: Tensor, form: GroupCodes | None, bias: Tensor | None = None) -> Linear:
    """The product with a head [W, D]; with a form quantized, or with its values for kernels that do not multiply it."""
    if form is None or not form.takes(weight.shape[1]):
        return Linear(kernel, weight, bias)
    if type(form) in kernel.capabilities.quantized:
        return Linear(kernel, PlainWeight(weight, form), bias, format=form)
    return Linear(kernel, weight.copy_(quantized_values(weight, form)), bias)


def table_shape(config: ModelConfig) -> tuple[int, int]:
    """Of an embedding or head."""
    return config.vocab_size, config.hidden_size


def load_vocabulary(read: Callable[..., Tensor], reader: WeightSource, shape: tuple[int, ...], group: Group) -> Tensor:
    """This rank's rows of an embedding or head, or of the head's bias; their number is the same on all ranks, padding
    rows are zero.

    Args:
        read: `reader`'s `tensor` or `linear` for the weight. shape: [V, D] or [V].
    """
    if group.size == 1:
        return read(shape)
    width = -(-shape[0] // group.size)
    start = min(group.rank * width, shape[0])
    stop = min(start + width, shape[0])
    weight = torch.zeros(width, *shape[1:], dtype=reader.dtype, device=reader.device)
    read(shape, Cut(slice(start, stop)), out=weight[: stop - start])
    return weight


def _repeat(counts: Sequence[int], times: int) -> list[int]:
    return [count for count in counts for _ in range(times)]
