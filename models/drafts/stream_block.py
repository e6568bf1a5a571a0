"""DSpark layers in a checkpoint of DeepSeek V4 or V4.1, which fill in a block of tokens in one forward.

Legend: T tokens, S rows, D hidden, n streams, F width of the model's states, V vocabulary.

The layers are decoder layers without entries. Keys of a computed token come from the model's streams after several
layers, x = main_norm(main_proj(means of the streams)), in every draft layer. A block is the last token with mask tokens
after it. Each of its tokens attends to the same tokens: the window before the block, and the whole block. Logits are
those of the model's head on norm(weighted sum of the streams), with the bias of the Markov head. V4.1's layers may have
fewer experts than the model's.

Source: `inference/model.py` of the releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config_sections.block import MARKOV
from moe_engine.models.drafts.markov_head import MarkovHead
from moe_engine.models.footprint import held_bytes
from moe_engine.models.layers.decoder import Decoder, Reloadable
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.residual.streams import spread
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.step_sizes import StepSizes

if TYPE_CHECKING:
    from moe_engine.models.families.deepseek_v4 import DeepseekV4Model


class StreamBlock:
    """The draft layers of a loaded `model`; implements `models.drafts.block_head.BlockLayers`."""

    visible = False
    ids: Tensor | None = None
    windows: tuple[int | None, ...] = (None,)

    def __init__(self, model: Decoder, reader: WeightSource) -> None:
        own, config = model.config.own_block, model.config
        assert own is not None and config.streams is not None
        self.block, self._streams = own.block, config.streams
        self._model: DeepseekV4Model = cast(Any, model)
        first = config.num_layers
        self.kv_layers = range(first, first + config.num_nextn_predict_layers)
        self._names = [f"model.layers.{i}" for i in self.kv_layers]
        self._project, self._main_norm = self._main_proj(reader), self._norm(reader)
        norms = [model.make_norm(reader, name) for name in self._norm_names]
        self._input_norm = norms[0]
        self._layers = [model.make_layer(i, reader, norm) for i, norm in zip(self.kv_layers, norms[1:])]
        for norm, layer in zip(norms, self._layers):
            norm.feed(layer.attention.input_format)
        self.markov: MarkovHead | None = self._markov(reader) if self.block.markov_rank else None
        self.weight_bytes = held_bytes(self, shared=model)
        """Bytes of the layers in addition to the model, in the kernels' layouts."""

    @property
    def planner(self) -> InPlacePlanner:
        """Plans of captured blocks."""
        return self._model.planner_of_blocks

    @property
    def feed_forwards(self) -> list[Any]:
        return [layer.feed_forward for layer in self._layers]

    def modules(self) -> Iterator[Reloadable]:
        """As `Decoder.modules`."""
        model, names = self._model, self._norm_names
        yield Reloadable((f"{self._names[0]}.main_proj.",), self._project, self._main_proj)
        yield Reloadable((f"{self._names[0]}.main_norm.",), self._main_norm, self._norm)
        make = partial(model.make_norm, prefix=names[0])
        yield Reloadable(model.norm_prefixes(names[0]), self._input_norm, make)
        for index, layer, norm in zip(self.kv_layers, self._layers, names[1:]):
            yield from model.layer_modules(index, layer, norm)
        if self.markov is not None:
            yield Reloadable((f"{self._names[-1]}.{MARKOV}.",), self.markov, self._markov)

    def remember(self, states: Tensor, batch: ForwardBatch) -> None:
        """Writes the keys of computed tokens.

        Args:
            states: [T, F], means of the model's streams, of several layers side by side.
            batch: positions and slots of the tokens; without a plan.
        """
        x = self._main_norm(self._project(states))
        batch = self._model.place(batch)
        for layer in self._layers:
            layer.attention.remember(x, batch)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Blocks of tokens -> v [T, D]; the blocks are the decodes of `batch`."""
        args = self._model.block_args(batch)
        residual = spread(self._model.embedding(batch.input_ids), self._streams)
        x = self._input_norm(residual)
        for layer in self._layers:
            x = layer.forward(x, residual, *args)
        return x

    def logits(self, v: Tensor, sizes: StepSizes | None = None) -> Tensor:
        """v [S, D] -> [S, V] float32, without the bias of `markov`. `sizes` as in `Model.logits`."""
        return self._model.logits(v, sizes)

    @property
    def _norm_names(self) -> list[str]:
        """Names of the norms before each layer, and of the one after the last."""
        return [*(f"{name}.input_layernorm" for name in self._names), f"{self._names[-1]}.shared_head.norm"]

    def _main_proj(self, reader: WeightSource) -> Any:
        own, size = self._model.config.own_block, self._model.config.hidden_size
        assert own is not None
        names = [f"{self._names[0]}.main_proj"]
        return load_linear(self._model.backends.linear, reader, names, [size], len(own.tapped) * size)

    def _norm(self, reader: WeightSource) -> RMSNorm:
        config = self._model.config
        name = f"{self._names[0]}.main_norm"
        return RMSNorm(self._model.backends.ops, reader, name, config.hidden_size, config.norm_eps)

    def _markov(self, reader: WeightSource) -> MarkovHead:
        config, name = self._model.config, f"{self._names[-1]}.{MARKOV}"
        return MarkovHead(self.block, reader, config.hidden_size, config.vocab_size, name)
