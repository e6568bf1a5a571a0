"""Requests of the offline engine: SGLang's keywords, checked like the bodies of /generate and /encode."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from moe_engine.frontend.encoding import EncodeRequest, encode_input
from moe_engine.frontend.generate_input import GenerateInput, GenerateRequest
from moe_engine.validation import checked, refuse_unavailable


def generate_request(prompt: Any, sampling: Any, input_ids: Any, stream: bool, fields: dict[str, Any]) -> GenerateInput:
    known = GenerateRequest.__struct_fields__
    if unknown := [name for name in fields if name not in known]:
        raise TypeError(f"generate() has no field {unknown[0]!r}; those of /generate are {', '.join(known)}")
    request = checked({**fields, "input_ids": input_ids, "stream": stream}, GenerateRequest)
    refuse_unavailable(request)
    return GenerateInput(**{**asdict(request), "text": prompt, "sampling_params": sampling}, text_field="prompt")


def encode_request(prompt: Any, input_ids: Any, dimensions: int | None, fields: dict[str, Any]) -> GenerateInput:
    known = EncodeRequest.__struct_fields__
    if unknown := [name for name in fields if name not in known]:
        raise TypeError(f"encode() has no field {unknown[0]!r}; those of /encode are {', '.join(known)}")
    request = checked({**fields, "input_ids": input_ids, "dimensions": dimensions}, EncodeRequest)
    refuse_unavailable(request)
    return encode_input({**asdict(request), "text": prompt}, text_field="prompt")
