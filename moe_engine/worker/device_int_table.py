"""Integer tables on the device that a step reads and writes by index: slots, tokens, lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.worker.device_stream import DeviceStream


class DeviceIntTable:
    """Flat access to an integer tensor on the device; with numpy on the CPU (`host_view`)."""

    def __init__(self, values: Tensor, stream: DeviceStream) -> None:
        self._flat = values.view(-1)
        self._stream = stream
        self._host = stream.host_view(self._flat)

    def take(self, index: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        """values.flat[index] in a dtype, new memory of the shape of `index`."""
        if self._host is not None:
            return torch.from_numpy(self._host[index.numpy()]).to(dtype)
        return self._flat.index_select(0, index.flatten()).to(dtype).view(index.shape)

    def put(self, index: Any, values: Any) -> None:
        """values.flat[index] = values, tensors of one shape, or `DeviceStream.arrays`; indices must be unique."""
        if self._host is not None:
            self._host[np.asarray(index)] = np.asarray(values)
        else:
            self._flat.index_copy_(0, index.flatten(), values.flatten().to(self._flat.dtype))

    def read(self, index: np.ndarray) -> np.ndarray:
        """values.flat[index] on the host, in the table's type; synchronizes with an accelerator, unless the index is
        empty."""
        if self._host is not None:
            return self._host[index]
        return self._stream.read(self._flat if index.size else self._flat[:0])[index]

    def put_from_host(self, index: np.ndarray, values: np.ndarray) -> None:
        """values.flat[index] = values, arrays of one shape."""
        if self._host is not None:
            self._host[index] = values
        else:
            count, dtype = index.size, np.int32 if self._flat.dtype == torch.int32 else np.int64
            staging = self._stream.staging(2 * count)
            host = staging.numpy()
            parts = [host[:count], host[count:].view(dtype)[:count]]
            parts[0][:], parts[1][:] = index.ravel(), values.ravel()
            self.put(*self._stream.upload_parts(staging, parts))
