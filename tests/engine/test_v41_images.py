"""Images of DeepSeek V4.1 in whole engines: tokens of the formulas in parallel forms, DSpark drafts after images."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from moe_engine import Engine
from moe_engine.media.image_process import load_processor
from tests.engine.test_v4_dspark import FLAGS, GREEDY
from tests.models.parity_families import Prompt, image_prompts
from tests.models.v41_dspark import make_v41_dspark
from tests.models.v41_images import V41Oracle
from tests.models.v41_tower import IMAGE, VISION, DelimitedPixels
from tests.speculation.eagle_heads import chain_counts

pytestmark = pytest.mark.usefixtures("forked_processes")

FORMS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "chunks": {"chunked_prefill_size": 16, "page_size": 16, "max_running_requests": 2, "speculative_num_steps": 2},
    "tp": {"tp_size": 2, "speculative_num_steps": 3},
    "ep": {"tp_size": 2, "ep_size": 2, "mm_enable_dp_encoder": True},
    "dp attention": {"tp_size": 2, "attn_dp_size": 2},
    "tokens that travel": {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> V41Oracle:
    pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")
    folder = tmp_path_factory.mktemp("v41")
    return V41Oracle(make_v41_dspark(folder, random.randrange(1 << 30), agreeing=True, vision=VISION))


@pytest.fixture(scope="module")
def prompts(oracle: V41Oracle) -> list[Prompt]:
    """Some share images and prefixes."""
    processor = load_processor(str(oracle.path))

    def pixels(picture: Any) -> DelimitedPixels:
        found = processor(images=[picture])
        return DelimitedPixels(tuple(found["image_grid_thw"][0].tolist()), torch.from_numpy(found["pixel_values"]))

    made = image_prompts(random.randrange(1 << 30), 9, 110, pixels, ([], IMAGE, []), side=24)
    found = [prompt for prompt in made if prompt.images]
    assert len(found) > 1
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize("form", FORMS)
def test_drafts_behind_images(oracle: V41Oracle, prompts: list[Prompt], form: str) -> None:
    """The model's tokens, together and after a cached image; the acceptance of an offline count."""
    depth = FORMS[form].get("speculative_num_steps", 4)
    ids, data = [prompt.ids for prompt in prompts], [prompt.data for prompt in prompts]
    with Engine(str(oracle.path), **FLAGS | FORMS[form]) as engine:
        outputs: Any = engine.generate(input_ids=ids, image_data=data, sampling_params=GREEDY)
        again: list[Any] = []
        for own in zip(ids, data):
            for _ in range(2):  # others may have evicted the prefix; of two attention groups any may get the request
                last = engine.generate(input_ids=own[0], image_data=own[1], sampling_params=GREEDY)
            again.append(last)
    counts, wanted = [], []
    for prompt, output, cached in zip(prompts, outputs, again, strict=True):
        tokens, whole = output["output_ids"], prompt.whole
        assert cached["output_ids"] == tokens
        assert "attn_dp_size" in FORMS[form] or cached["meta_info"]["cached_tokens"] > len(whole) - 20
        assert output["meta_info"]["prompt_tokens"] == len(whole)
        logits = oracle.logits(whole + tokens[:-1], prompt.images)[len(whole) - 1 :]
        assert tokens == logits.argmax(-1).tolist()
        states = oracle.states(whole + tokens, prompt.images)
        wanted.append(sum(chain_counts(oracle.text.chain, states, whole, tokens, depth)[1]))
        counts.append(output["meta_info"]["spec_num_correct_drafts"])
    assert counts == wanted and sum(counts) > 0
