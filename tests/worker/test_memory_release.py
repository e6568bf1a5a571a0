"""Both ways of releasing memory: views of it have the same content, or zeros, afterwards."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.memory_release import _PagesAway, _StoragesAway, distinct


@pytest.mark.parametrize("way", [_PagesAway, _StoragesAway])
@pytest.mark.parametrize("keeps", [True, False])
def test_views_see_the_content_again(way: type[_PagesAway] | type[_StoragesAway], keeps: bool) -> None:
    whole = torch.randn(random.randint(1, 50_000))
    tensors = [whole, whole[1:], whole.view(1, -1), torch.randn(3, 7), torch.empty(0)]
    expected = [tensor.clone() if keeps else torch.zeros_like(tensor) for tensor in tensors]
    storages = distinct(tensors)
    assert len(storages) == 2
    away = way(DeviceStream("cpu"), storages, keeps)
    if way is _StoragesAway:
        assert whole.untyped_storage().nbytes() == 0 and away.num_bytes == whole.nbytes + 84
    away.back()
    for tensor, wanted in zip(tensors, expected):
        assert torch.equal(tensor, wanted)
