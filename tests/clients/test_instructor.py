"""instructor against the embedded model, in each mode that constrains the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.clients.conftest import KEY

instructor = pytest.importorskip("instructor", reason="needs instructor: pip install instructor")

MODES = ("TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS")
"""Without `JSON`, which enforces no type: the embedded model was not trained on this type. `PARALLEL_TOOLS` does not
enforce a call."""
QUESTION: Any = [{"role": "user", "content": "Describe Paris as JSON."}]


class Place(BaseModel):
    """A place. Without additional properties, so that the embedded model cannot add properties without end."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["city", "river"]
    number: Literal[1, 2, 3]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_returns_the_type(client: openai.OpenAI, mode: str) -> None:
    if not hasattr(instructor.Mode, mode):
        pytest.skip(f"this instructor has no mode {mode}")
    made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    length = {"max_output_tokens": 200} if "RESPONSES" in mode else {"max_tokens": 200}
    found = made.chat.completions.create(
        model="default", response_model=Place, messages=QUESTION, max_retries=0, temperature=0, **length
    )
    assert isinstance(found, Place)


def test_partial_answers_are_streamed(client: openai.OpenAI) -> None:
    made = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    parts = list(
        made.chat.completions.create_partial(
            model="default", response_model=Place, messages=QUESTION, max_retries=0, temperature=0, max_tokens=200
        )
    )
    assert parts[-1].kind in ("city", "river") and parts[-1].number in (1, 2, 3)
