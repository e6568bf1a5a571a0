"""Ids of Kimi K2's tool calls: ``functions.NAME:N``, with calls numbered over the whole conversation.

The model is trained with such ids in its history, and makes worse calls with other ids (clients' `messages` often have
ids of their own, or numbers that restart in each answer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def counted_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


def num_calls(messages: Sequence[dict[str, Any]]) -> int:
    """Tool calls in a conversation."""
    return sum(len(message.get("tool_calls") or ()) for message in messages)


def with_counted_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the ids that the model would have written; results refer to the latest call of their id."""
    ids: dict[Any, str] = {}
    changed, number = [], 0
    for message in messages:
        if calls := message.get("tool_calls"):
            renamed = []
            for call in calls:
                own = counted_id(call["function"]["name"], number)
                ids[call.get("id")] = own
                renamed.append({**call, "id": own})
                number += 1
            message = {**message, "tool_calls": renamed}
        elif message.get("role") == "tool" and message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        changed.append(message)
    return changed
