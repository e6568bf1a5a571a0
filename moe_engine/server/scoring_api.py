"""Scores of texts: /v1/score (label tokens, or classes), /v1/rerank and /v1/classify, in SGLang's format."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moe_engine.errors import InputError
from moe_engine.frontend.encoding import check_kind, encode_input
from moe_engine.frontend.frontend import Job
from moe_engine.frontend.scoring import ScoreRequest, label_logprobs, score_input, scores_of, softmax
from moe_engine.server.bodies import Plan
from moe_engine.server.embeddings_api import encode_plan, encodings_of
from moe_engine.server.http_io import decode_body, json_response
from moe_engine.server.openai.answers import Classification, ClassList, Ranked, Relevance, Relevances, Scores
from moe_engine.server.openai.common import usage_of
from moe_engine.server.openai.types import ClassifyRequest, RelevanceRequest, RerankRequest
from moe_engine.server.state import ServerState
from moe_engine.validation import refuse_unavailable


class ScoringApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    # -- /v1/score

    async def score(self, request: Request) -> Response:
        """Scores of items for a query: probabilities of label tokens, or of a classifier's classes."""
        plan = await self._state.bodies.plan(request, "score")
        asked, model = plan.options
        job = await encode_plan(self._state, request, plan)
        rows = scores_of(job.generations, bool(asked.apply_softmax), asked.temperature)
        answer: Scores = {"object": "scoring", "scores": rows, "model": model, "usage": self._usage(job)}
        if asked.return_token_logprobs:
            answer["token_logprobs"] = label_logprobs(job.generations)
        return json_response(answer)

    def read_score(self, body: bytes | bytearray) -> Plan:
        """`Plan.options`: the request without its texts, the model's name."""
        req = decode_body(body, ScoreRequest)
        refuse_unavailable(req)
        model, info = self._state.base_model(req.model), self._state.client.info
        inp = score_input(req, info, self._state.frontend.settings.max_logprobs)
        shaping = msgspec.structs.replace(req, query=None, items="", label_token_ids=None)
        return Plan(self._state.frontend.read(inp), (shaping, model))

    # -- /v1/rerank

    async def rerank(self, request: Request) -> Response:
        """Documents sorted by their scores for a query."""
        plan = await self._state.bodies.plan(request, "rerank")
        ranked, _ = await self._ranked(request, plan)
        return json_response(ranked)

    async def relevance(self, request: Request) -> Response:
        """Documents sorted by their relevance for a query, in the form of Cohere, Jina and vLLM."""
        plan = await self._state.bodies.plan(request, "relevance")
        ranked, job = await self._ranked(request, plan)
        results: list[Relevance] = []
        for one in ranked:
            found: Relevance = {"index": one["index"], "relevance_score": softmax([one["score"], 0.0])[0]}
            if one["document"] is not None:
                found["document"] = {"text": one["document"]}
            results.append(found)
        answer: Relevances = {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": plan.options.model or self._state.model_name,
            "results": results,
            "usage": self._usage(job),
        }
        return json_response(answer)

    async def _ranked(self, request: Request, plan: Plan) -> tuple[list[Ranked], Job]:
        req: RerankRequest = plan.options
        job = await encode_plan(self._state, request, plan)
        ranked: list[Ranked] = [
            {
                "score": encoding.vector()[0],
                "document": req.documents[encoding.index] if req.return_documents is not False else None,
                "index": encoding.index,
                "meta_info": encoding.meta_info(),
            }
            for encoding in encodings_of(job)
        ]
        ranked.sort(key=lambda one: one["score"], reverse=True)
        return ranked[: req.top_n], job

    def read_rerank(self, body: bytes | bytearray) -> Plan:
        """`Plan.options`: the request."""
        return self._read_rerank(decode_body(body, RerankRequest))

    def read_relevance(self, body: bytes | bytearray) -> Plan:
        """`Plan.options`: the request."""
        return self._read_rerank(decode_body(body, RelevanceRequest))

    def _read_rerank(self, req: RerankRequest) -> Plan:
        refuse_unavailable(req)
        pooling = self._state.client.info.pooling
        if pooling is None or not pooling.head or pooling.width != 1:
            raise InputError(
                "reranking needs a classification or reward model with one score for a query and a document; for "
                "embeddings, compare the vectors of /v1/embeddings"
            )
        self._check_lengths(req)
        ids = self._state.tokenizer().encode_pairs([(req.query, document) for document in req.documents])
        inp = encode_input({"input_ids": ids, "rid": req.rid}, ids_field="documents")
        return Plan(self._state.frontend.read(inp), req)

    def _check_lengths(self, req: RerankRequest) -> None:
        """Refuses texts that cannot fit, before they are tokenized."""
        limit, each = self._state.client.info.context_len, self._state.tokenizer().max_token_chars
        for i, document in enumerate(req.documents):
            if (least := (len(req.query) + len(document)) // each) >= limit:
                words = f"with the query at least {least} tokens, longer than the model's context length ({limit})"
                raise InputError(f"documents[{i}]: {words}", field="documents")

    # -- /v1/classify

    async def classify(self, request: Request) -> Response:
        """Probabilities of a classifier's classes."""
        plan = await self._state.bodies.plan(request, "classify")
        job, pooling = await encode_plan(self._state, request, plan), self._state.client.info.pooling
        assert pooling is not None
        data: list[Classification] = []
        for encoding in encodings_of(job):
            probs = softmax(encoding.vector())
            label = pooling.labels[probs.index(max(probs))]
            data.append({"index": encoding.index, "label": label, "probs": probs, "num_classes": len(probs)})
        answer: ClassList = {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": plan.options,
            "data": data,
            "usage": self._usage(job),
        }
        return json_response(answer)

    def read_classify(self, body: bytes | bytearray) -> Plan:
        """`Plan.options`: the model's name."""
        info = self._state.client.info
        check_kind(info, pooled=True)
        req = decode_body(body, ClassifyRequest)
        refuse_unavailable(req)
        model = self._state.base_model(req.model)
        if info.pooling is None or not info.pooling.head:
            raise InputError("/v1/classify needs a classification model; this one has no classes (/v1/embeddings)")
        return Plan(
            self._state.frontend.read(encode_input(req.prompts(), text_field="input", ids_field="input")), model
        )

    # -- common

    def _usage(self, job: Job) -> Any:
        """Token counts of the prompts; the answer has no tokens."""
        usage = usage_of(job.generations, cache_report=self._state.flags.enable_cache_report)
        usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
        return usage
