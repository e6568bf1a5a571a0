"""Query tokens cut into records: neighboring tokens of one request, whose queries one program of a kernel holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.uploads import upload


def upload_records(queries: PagedQueries, most: int, device: torch.device) -> tuple[Tensor, np.ndarray]:
    """Records of at most `most` tokens: int32 [N, 3] on the device (request, first token, number of tokens), and the
    tokens before each of them [N + 1] on the host."""
    lens = np.asarray(queries.query_lens, dtype=np.int64)
    count = -(-lens // most)
    request = np.repeat(np.arange(len(lens)), count)
    number = np.arange(len(request)) - np.repeat(np.cumsum(count) - count, count)
    first = np.repeat(np.cumsum(lens) - lens, count) + number * most
    tokens = np.minimum(lens[request] - number * most, most)
    table = np.stack((request, first, tokens), 1).astype(np.int32)
    return upload(table, device), np.append(first, lens.sum())
