"""The static input buffers that captured steps read.

Legend: T tokens, R requests; maxima over all graphs.
"""

from __future__ import annotations

import torch

from moe_engine.kernels.speculation.decode_inputs import DecodeBuffers
from moe_engine.models.batch import PoolStarts
from moe_engine.types.step_settings import GraphSettings
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache.state_pool import StatePool
from moe_engine.worker.kv_cache.static_states import StaticStates


class StaticInputs:
    """Copies of a step's tensors. Entries after the requests of a step are neutral padding.

    Args:
        windows, pools: steps have `windows`, `pool_starts`.
    """

    def __init__(
        self, settings: GraphSettings, stream: DeviceStream, windows: bool, states: StatePool | None,
        pools: bool = False,
    ) -> None:  # fmt: skip
        tokens, requests, device = settings.max_tokens, max(settings.sizes), stream.device
        self.neutral_context = max(settings.counts)
        """Context tokens of a padded request: its max number of query tokens."""
        self.input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)  # [T]
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)  # [T]
        self.slots = torch.zeros(tokens, dtype=torch.int64, device=device)  # [T]
        self.real = torch.zeros(tokens, dtype=torch.int32, device=device)  # [T]
        self._of_tokens = [self.input_ids, self.positions, self.slots, self.real]
        self.decodes: DecodeBuffers | None = None
        """The buffers that `DecodeKernels.enter` fills; None: steps have tensors that it does not know."""
        self.window_slots = torch.zeros(tokens if windows else 0, dtype=torch.int64, device=device)  # [T]
        if windows:
            self._of_tokens.append(self.window_slots)
        self.pool_places = torch.zeros(tokens if pools else 0, dtype=torch.int64, device=device)  # [T]
        self.pool_axes = torch.zeros(len(self.pool_places), 3, dtype=torch.int64, device=device)  # [T, 3]
        if pools:
            self._of_tokens += [self.pool_places, self.pool_axes]
        self.rows = torch.zeros(requests, dtype=torch.int32, device=device)  # [R]
        self.context_lens = torch.full((requests,), self.neutral_context, dtype=torch.int32, device=device)  # [R]
        if not (windows or pools):
            self.decodes = DecodeBuffers(self.input_ids, self.positions, self.slots, self.rows, self.context_lens)
        self.states = None if states is None else StaticStates(states, requests, tokens, device)
        self._used = (0, 0)  # requests and tokens of the step before

    def pool_starts(self, tokens: int) -> PoolStarts | None:
        """Pool starts of the first tokens; None: steps have none."""
        return PoolStarts(self.pool_places[:tokens], self.pool_axes[:tokens]) if len(self.pool_places) else None

    def enter(self, count: int) -> DecodeBuffers | None:
        """`decodes` of a step's requests, for a write of all of them."""
        used_requests, used_tokens = self._used
        if self.decodes is None:
            return None
        if count > used_tokens:
            self.real[used_tokens:count].fill_(1)
        self._used = (max(used_requests, count), max(used_tokens, count))
        return self.decodes.first(count)

    def fill(self, batch: StepBatch | None) -> None:
        """Copies a step's tensors to the buffers, unless they are there already; None: padding only."""
        num_tokens = num_requests = 0
        queries = batch.attention.decode if batch is not None else None
        if batch is not None and queries is not None:
            num_tokens, num_requests = queries.num_tokens, queries.num_requests
        used_requests, used_tokens = self._used
        if num_tokens > used_tokens:
            self.real[used_tokens:num_tokens].fill_(1)
        self._used = (max(used_requests, num_requests), max(used_tokens, num_tokens))  # in case a copy raises
        if batch is not None and queries is not None and batch.input_ids.data_ptr() != self.input_ids.data_ptr():
            of_tokens = [
                (self.input_ids, batch.input_ids),
                (self.positions, batch.positions),
                (self.slots, batch.slots),
            ]
            if batch.windows is not None:
                of_tokens.append((self.window_slots, batch.windows.slots))
            if (starts := batch.pool_starts) is not None:
                of_tokens += [(self.pool_places, starts.places), (self.pool_axes, starts.axes)]
            of_requests = [(self.rows, queries.rows), (self.context_lens, queries.context_lens_device)]
            for pairs, count in ((of_tokens, num_tokens), (of_requests, num_requests)):  # a launch for each dtype
                torch._foreach_copy_([buffer[:count] for buffer, _ in pairs], [given for _, given in pairs])
        if self.states is not None:
            stored = None if batch is None else batch.stored_states
            self.states.fill(None if queries is None else queries.rows, stored, (used_requests, used_tokens))
        if used_tokens > num_tokens:
            for buffer in self._of_tokens:
                buffer[num_tokens:used_tokens].zero_()
        if used_requests > num_requests:
            self.rows[num_requests:used_requests].zero_()
            self.context_lens[num_requests:used_requests].fill_(self.neutral_context)
        self._used = (num_requests, num_tokens)
