"""Integer tables on the host; `DeviceStream.arrays`. On a device: `simulated_cuda/on_device/test_worker_parts.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.worker.device_int_table import DeviceIntTable
from moe_engine.worker.device_stream import DeviceStream


def make_table(stream: DeviceStream, values: np.ndarray, dtype: torch.dtype) -> tuple[DeviceIntTable, torch.Tensor]:
    tensor = stream.upload(torch.from_numpy(values).to(dtype))
    return DeviceIntTable(tensor, stream), tensor


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.int32, torch.int64]))
def test_a_table_is_its_flat_array(seed: int, dtype: torch.dtype) -> None:
    check_table(seed, dtype, DeviceStream("cpu"))


def check_table(seed: int, dtype: torch.dtype, stream: DeviceStream) -> None:
    """Reads and writes with tensors, with `arrays`, and from the host, against numpy indexing."""
    rng = np.random.default_rng(seed)
    expected = rng.integers(-9, 1 << 30, (rng.integers(1, 5), rng.integers(1, 7)))
    table, tensor = make_table(stream, expected, dtype)
    flat = expected.ravel()
    for _ in range(4):
        shape = (1, rng.integers(0, expected.size + 1)) if rng.random() < 0.5 else (rng.integers(0, expected.size + 1),)
        index = rng.permutation(expected.size)[: shape[-1]].reshape(shape)
        values = rng.integers(0, 1 << 30, shape)
        match rng.integers(3):
            case 0:
                table.put(stream.upload(torch.from_numpy(index)), stream.upload(torch.from_numpy(values)))
            case 1:
                table.put(*stream.arrays(*(stream.upload(torch.from_numpy(a)) for a in (index, values))))
            case 2:
                table.put_from_host(index, values)
        flat[index] = values
        taken = table.take(stream.upload(torch.from_numpy(index)))
        assert taken.dtype == torch.int64
        assert stream.read(taken).tolist() == values.tolist()
        assert table.read(index).tolist() == values.tolist()
        assert stream.read(tensor).tolist() == expected.tolist()


def test_what_was_taken_is_memory_of_its_own() -> None:
    table, _ = make_table(DeviceStream("cpu"), np.arange(6), torch.int64)
    taken = table.take(torch.tensor([1, 2]))
    table.put(torch.tensor([1, 2]), torch.tensor([7, 8]))
    assert taken.tolist() == [1, 2]


def test_arrays_share_memory_where_the_host_has_it() -> None:
    tensors = torch.arange(4), torch.zeros(2, 3)
    arrays = DeviceStream("cpu").arrays(*tensors)
    assert all(isinstance(array, np.ndarray) for array in arrays)
    arrays[0][1] = 9
    assert tensors[0].tolist() == [0, 9, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_host_view_has_the_bits(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 4).mul(100).to(dtype)
    view = DeviceStream("cpu").host_view(tensor)
    assert view is not None and view.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    view[1] = view[0]
    assert torch.equal(tensor[0], tensor[1])
