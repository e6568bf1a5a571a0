"""Vectors of prompts: /v1/embeddings in OpenAI's format, /encode and /classify in SGLang's."""

from __future__ import annotations

import base64
import sys

from starlette.requests import Request
from starlette.responses import Response

from moe_engine.frontend.encoding import EncodeRequest, Encoding, check_kind, encode_input
from moe_engine.frontend.frontend import Job
from moe_engine.server.bodies import Plan
from moe_engine.server.embedding_inputs import rendered_input
from moe_engine.server.http_io import cancel_on_disconnect, decode_body, decode_body_and_rest, json_response
from moe_engine.server.openai.answers import Embedding, EmbeddingList
from moe_engine.server.openai.common import usage_of
from moe_engine.server.openai.types import EmbeddingRequest
from moe_engine.server.state import ServerState
from moe_engine.validation import refuse_unavailable


class EmbeddingsApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def embeddings(self, request: Request) -> Response:
        """Embeddings, OpenAI's format."""
        plan = await self._state.bodies.plan(request, "embeddings")
        encoding_format, model = plan.options
        job = await encode_plan(self._state, request, plan)
        data: list[Embedding] = [
            {"object": "embedding", "embedding": _shown(encoding, encoding_format), "index": encoding.index}
            for encoding in encodings_of(job)
        ]
        usage = usage_of(job.generations, cache_report=self._state.flags.enable_cache_report)
        answer: EmbeddingList = {"object": "list", "data": data, "model": model, "usage": usage}
        return json_response(answer)

    def read_embeddings(self, body: bytes | bytearray) -> Plan:
        """`Plan.options`: the form of the vectors, the model's name."""
        check_kind(self._state.client.info, pooled=True)
        req = decode_body(body, EmbeddingRequest)
        refuse_unavailable(req)
        model = self._state.base_model(req.model)
        messages = None if req.messages is None else decode_body_and_rest(body, EmbeddingRequest)[1]["messages"]
        prompts = {"text_field": "input"} | req.prompts() | rendered_input(self._state, req, messages)
        inp = encode_input({**prompts, "dimensions": req.dimensions}, ids_field="input")
        return Plan(self._state.frontend.read(inp), (req.encoding_format or "float", model))

    async def encode(self, request: Request) -> Response:
        """Vector of a prompt, or of each of a batch."""
        plan = await self._state.bodies.plan(request, "encode")
        job = await encode_plan(self._state, request, plan)
        outputs = [encoding.output() for encoding in encodings_of(job)]
        return json_response(outputs if job.is_list else outputs[0])

    async def classify(self, request: Request) -> Response:
        """Scores of a classification or reward model, in SGLang's shape of /encode."""
        return await self.encode(request)

    def read_encode(self, body: bytes | bytearray) -> Plan:
        check_kind(self._state.client.info, pooled=True)
        request = decode_body(body, EncodeRequest)
        refuse_unavailable(request)
        return Plan(self._state.frontend.read(encode_input(request)))


async def encode_plan(state: ServerState, request: Request, plan: Plan) -> Job:
    """Runs the plan to its end. Raises ClientDisconnectedError: the client disconnected, and the job is cancelled."""
    job = await cancel_on_disconnect(request, state.frontend.begin(plan.read))
    await cancel_on_disconnect(request, state.frontend.collect(job))
    return job


def encodings_of(job: Job) -> list[Encoding]:
    return [generation for generation in job.generations if isinstance(generation, Encoding)]


def _shown(encoding: Encoding, encoding_format: str) -> list[float] | str:
    values = encoding.vector()
    if encoding_format == "float":
        return values.tolist()
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
