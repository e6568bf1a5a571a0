"""Requests for vectors (embeddings, scores): their input, and the output of one prompt."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict

from moe_engine.core.messages import RequestDelta
from moe_engine.errors import GenerationError, InputError
from moe_engine.frontend.client_api import EngineInfo
from moe_engine.frontend.generate_input import DpRank, GenerateInput, Ids, ImageData, Priority, Rid, Text
from moe_engine.frontend.generation import Generation
from moe_engine.sampling_checks import TokenId
from moe_engine.types import SamplingParams
from moe_engine.validation import OffOnly

Dimensions = Annotated[int, Meta(ge=1, le=2**20, description="the first numbers of the vector, normalized again")]
_NOTHING_SAMPLED = SamplingParams(max_new_tokens=0)


class EncodeRequest(Struct, kw_only=True):
    """One prompt or a batch, as in `GenerateRequest`. `sampling_params` are ignored, as in SGLang."""

    text: Text | Annotated[list[Text], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | Ids], Meta(min_length=1, description="of one prompt or a batch")] | None = None
    dimensions: Dimensions | None = None
    rid: Rid | list[Rid] | None = None
    log_metrics: Annotated[bool, Meta(description="false: without metrics and request log")] | None = None
    priority: Priority | None = None
    extra_key: str | list[str | None] | None = None
    routed_dp_rank: DpRank | None = None
    data_parallel_rank: Annotated[DpRank, Meta(description="older name of routed_dp_rank")] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    image_data: ImageData | None = None
    video_data: OffOnly = None
    audio_data: OffOnly = None
    lora_path: OffOnly = None


def encode_input(fields: EncodeRequest | Mapping[str, Any], **more: Any) -> GenerateInput:
    """The frontend's request for vectors. `fields`: of `EncodeRequest`; `more`: of `GenerateInput`."""
    given = dict(asdict(fields) if isinstance(fields, EncodeRequest) else fields)
    given["sampling_params"] = _NOTHING_SAMPLED
    return GenerateInput(**given, pooled=True, **more)


def check_kind(info: EngineInfo, *, pooled: bool) -> None:
    """Raises InputError unless the served model supports requests of this kind: for vectors, or for text."""
    if pooled == (info.pooling is not None):
        return
    if pooled:
        raise InputError(
            f"{info.served_model_name} generates text: vectors need a server with --is-embedding, or a classification "
            "or reward model"
        )
    raise InputError(
        f"{info.served_model_name} is served for vectors, not for text (--is-embedding, or a checkpoint without a "
        "language-model head): use /v1/embeddings, /encode or /classify"
    )


def check_dimensions(info: EngineInfo, dimensions: int | None) -> None:
    """Raises InputError unless the vector can be truncated to this length."""
    pooling = info.pooling
    if dimensions is None or pooling is None:
        return
    problem = None
    if pooling.head:
        problem = f"{info.served_model_name} has a score head, whose numbers are classes; leave it out"
    elif dimensions > pooling.width:
        problem = f"{dimensions} is more than the {pooling.width} numbers of a vector"
    elif pooling.dimensions and dimensions not in pooling.dimensions:
        problem = f"{dimensions} is not one of the model's {', '.join(map(str, pooling.dimensions))}"
    if problem is not None:
        raise InputError.at("dimensions", problem)


def aborted(generation: Generation) -> InputError:
    """The error of a request for vectors or scores that ended without them: it may be sent again."""
    return InputError(f"the request was aborted: {(generation.finish or {}).get('message') or 'no result'}", status=503)


class Encoding(Generation):
    """The vector of one prompt. `dimensions`: its first numbers, normalized again if `normalizes`; None: all."""

    dimensions: int | None = None
    normalizes = False
    _vector: bytes | None = None

    def feed(self, delta: RequestDelta) -> None:
        if delta.vector is not None:
            self._vector = delta.vector
        super().feed(delta)

    def vector(self) -> array[float]:
        """The numbers (float32).

        Raises:
            InputError: 503, the request was aborted. GenerationError: the numbers are not finite.
        """
        if self._vector is None:
            raise aborted(self)
        values = array("f", self._vector)
        if self.dimensions is not None and self.dimensions < len(values):
            values = values[: self.dimensions]
            norm = math.hypot(*values) if self.normalizes else 1.0
            values = array("f", [value / norm for value in values]) if norm else values
        if not math.isfinite(sum(values)):
            raise GenerationError(
                "the model's vector has numbers that are not finite: weights of the checkpoint may be damaged, or "
                "--dtype too narrow; try --dtype bfloat16 or float32"
            )
        return values

    def output(self) -> dict[str, Any]:
        """SGLang's shape: {"embedding", "meta_info"}."""
        return {"embedding": self.vector().tolist(), "meta_info": self.meta_info()}
