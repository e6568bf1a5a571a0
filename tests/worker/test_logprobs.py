"""Log-probabilities of outputs and of prompts in chunks."""

from __future__ import annotations

import pytest
import torch

from moe_engine.types import LogprobSpec
from moe_engine.worker.batch.request_rows import PromptLogprobs
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.logprobs import PendingLogprobs, prompt_logprobs, token_logprobs
from tests.logprobs import unpack

STREAM = DeviceStream("cpu")
VOCAB = 50


def test_sampled_top_and_requested_tokens() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    tokens = torch.tensor([4, 49, 0, 7])
    specs = [LogprobSpec(None, 0), LogprobSpec(None, 3), LogprobSpec(None, 50), LogprobSpec(None, 0, (9, 9, 1))]
    blocks = PendingLogprobs.start(token_logprobs(logits, tokens, specs, STREAM), specs, STREAM).take()
    entries = [entry for block in blocks for entry in unpack(block)]
    expected = torch.log_softmax(logits, -1)
    for i, (entry, spec) in enumerate(zip(entries, specs)):
        assert entry.token_id == tokens[i]
        assert entry.logprob == pytest.approx(expected[i, tokens[i]].item(), abs=1e-6)
        order = expected[i].argsort(descending=True)[: spec.top].tolist()
        assert [t for t, _ in entry.top] == order
        assert [v for _, v in entry.top] == pytest.approx(expected[i, order].tolist(), abs=1e-6)
        assert len(entry.asked) == len(spec.token_ids)
        assert entry.asked == pytest.approx(expected[i, list(spec.token_ids)].tolist(), abs=1e-6)


@pytest.mark.parametrize("rows_at_once", [1, 3, 1000])
@pytest.mark.parametrize("start", [0, 1, 4, 10, 19])
@pytest.mark.parametrize("cached", [0, 4, 9])
def test_prompt_in_chunks(rows_at_once: int, start: int, cached: int) -> None:
    prompt = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    hidden = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(2))
    spec = LogprobSpec(start, 2, (5,))
    sizes: list[int] = []

    def logits_of(states: torch.Tensor) -> torch.Tensor:
        sizes.append(len(states))
        return states

    entries = []
    for begin, end in ((cached, 11), (11, 12), (12, 20), (20, 24)):  # the last chunk recomputes only outputs
        wanted = PromptLogprobs(prompt, spec, cached)
        found = prompt_logprobs(6, wanted, begin, hidden[begin:end], logits_of, rows_at_once, VOCAB, STREAM)
        if found is not None:
            assert found.row == 6
            entries.extend(unpack(found.take()))
    assert [e.token_id for e in entries] == prompt[start:]
    expected = hidden.log_softmax(-1)
    for position, entry in enumerate(entries, start):
        if position <= cached:
            assert entry.logprob is None
        else:
            assert entry.logprob == pytest.approx(expected[position - 1, prompt[position]].item(), abs=1e-6)
            assert len(entry.top) == 2 and len(entry.asked) == 1
    assert max(sizes, default=0) <= rows_at_once
