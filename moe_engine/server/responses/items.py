"""Items of a conversation, as /v1/responses/{id}/input_items lists them."""

from __future__ import annotations

from typing import Any

from moe_engine.errors import InputError
from moe_engine.server.responses.types import InputItem, InputItemsQuery, ItemList

PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


def input_items(given: str | list[InputItem], response_id: str) -> list[dict[str, Any]]:
    """Every item with an id and a status; texts of messages as lists of parts."""
    items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_item(item, f"{response_id.removeprefix('resp_')}_input_{i}") for i, item in enumerate(items)]


def output_items(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The output of a stored response as items of a later input, without log-probabilities. An output without items is
    an empty message: the roles of chat templates alternate."""
    items = response["output"]
    if not items:
        name = f"msg_{response['id'].removeprefix('resp_')}_0"
        items = [{"type": "message", "id": name, "role": "assistant", "content": ""}]
    items = input_items(items, response["id"])
    for item in items:
        for part in item.get("content", ()):
            part.pop("logprobs", None)
    return items


def _item(item: dict[str, Any], number: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    shown = {"status": "completed", **item, "type": kind, "id": item.get("id") or f"{PREFIXES[kind]}_{number}"}
    if kind == "message" and not isinstance(item.get("content"), list):
        text = item.get("content") or ""
        output: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        shown["content"] = [output if item["role"] == "assistant" else {"type": "input_text", "text": text}]
    return shown


def page_of(items: list[dict[str, Any]], query: InputItemsQuery) -> ItemList:
    """Raises InputError: `after` is not the id of an item."""
    ordered = items[::-1] if query.order == "desc" else items
    begin = 0
    if query.after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == query.after]
        if not places:
            raise InputError.at("after", f"{query.after!r:.80} is not the id of an item of this input")
        begin = places[0] + 1
    page = ordered[begin : begin + query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    more = begin + len(page) < len(ordered)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}
