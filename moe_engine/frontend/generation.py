"""Output of one sequence: collects the engine's deltas into text, tokens, log-probabilities and times.

Detokenization and the rendering of log-probabilities happen here, incrementally as the reader consumes pieces.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from moe_engine.core.messages import AddRequest, RequestDelta
from moe_engine.frontend.hidden_states import HiddenStates
from moe_engine.frontend.logprob_format import Columns, LogprobFormat, extend, num_tokens
from moe_engine.frontend.reasoning_count import ReasoningCount
from moe_engine.frontend.request_times import meta_times
from moe_engine.frontend.routed_experts import TokenExperts
from moe_engine.frontend.session_turns import Joined, Turn
from moe_engine.tokenizer.assembler import TextAssembler
from moe_engine.tokenizer.stop import Beginnings
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types import SamplingParams


@dataclass(slots=True)
class Piece:
    """New output of a sequence since the previous piece."""

    generation: Generation
    text: str
    token_ids: list[int]
    logprobs: Columns
    finish: dict[str, Any] | None


class PieceBuffer:
    """New output of a sequence that its reader has not taken.

    Args:
        interval: tokens between two pieces of a stream.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._piece: Piece | None = None
        self._has_begun = False

    @property
    def is_empty(self) -> bool:
        return self._piece is None

    def add(self, piece: Piece) -> None:
        if (waiting := self._piece) is None:
            self._piece = piece
            return
        waiting.text += piece.text
        waiting.token_ids += piece.token_ids
        extend(waiting.logprobs, piece.logprobs)
        waiting.finish = piece.finish

    def pass_by(self) -> None:
        """Reports that a piece was sent without the buffer."""
        self._has_begun = True

    def take(self) -> Piece | None:
        """The piece to send now; None while it is shorter than the interval. The first one has any length."""
        piece = self._piece
        if piece is None or not (piece.token_ids or piece.finish):
            return None
        if piece.finish is None and self._has_begun and len(piece.token_ids) < self._interval:
            return None
        self._piece, self._has_begun = None, True
        return piece


@dataclass(frozen=True, slots=True)
class Place:
    """A sequence among those of its request.

    Attributes:
        rid: the client's id, used by aborts, logs and responses.
        index: position among the sequences, prompt-major.
        prompt_index: index of its prompt.
    """

    rid: str
    index: int = 0
    prompt_index: int = 0


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How an output is detokenized and divided into pieces.

    Attributes:
        live: detokenize incrementally (a stream, or stop strings); otherwise once, at the end.
        interval: tokens between two pieces of a stream.
        no_output: nothing is generated: the request is for its prompt's log-probabilities.
        keep_special: special tokens that are text even if others are skipped.
        keep_logprobs: accumulate log-probabilities of the whole output; otherwise each piece holds only its own.
    """

    live: bool = True
    interval: int = 1
    no_output: bool = False
    keep_special: frozenset[int] = frozenset()
    keep_logprobs: bool = True


STREAM = OutputForm()


class Generation:
    """Collects the output of a sequence. Fed by `Frontend`, read by the API handlers.

    Args:
        request: its `rid` is the engine's.
        prompt_ids: of the client's prompt, if the engine has others instead of image tokens.
        observed: report it to metrics and request log.
        logprobs: format of log-probabilities in the response; None: not requested.
    """

    def __init__(
        self,
        request: AddRequest,
        sampling: SamplingParams,
        place: Place,
        *,
        tokenizer: Tokenizer | None = None,
        form: OutputForm = STREAM,
        logprobs: LogprobFormat | None = None,
        prompt_text: str | None = None,
        prompt_ids: list[int] | None = None,
        observed: bool = True,
    ) -> None:
        self.request = request
        self.rid, self.index, self.prompt_index = place.rid, place.index, place.prompt_index
        self.prompt_ids = request.prompt_ids if prompt_ids is None else prompt_ids
        self.prompt_text = prompt_text
        self.sampling = sampling
        self.logprob_format = logprobs
        self.observed = observed
        self.weight_version = "default"
        """Version of the weights at its start, which generate all of it."""
        self.lora: str | None = None
        """Name of its LoRA adapter."""
        self.hidden: HiddenStates | None = None
        """Requested final hidden states; `experts`: of its tokens."""
        self.experts: TokenExperts | None = None
        self.reasoning: ReasoningCount | None = None
        self.shows_prompt = False
        """The answer has the token ids of the prompt."""
        self.session: Joined | None = None
        """How its prompt continues a session; `turn`: its turn in the session, while it runs."""
        self.turn: Turn | None = None
        self.tokenizer = tokenizer
        self._texts: list[str] = []
        self.output_ids: list[int] = []
        self.output_logprobs: Columns = []
        self.prompt_logprobs: Columns = []
        self._keep_logprobs = form.keep_logprobs
        self._num_logprobs = 0
        self.finish: dict[str, Any] | None = None
        self.cached_tokens = 0
        self.retractions = 0
        self.queue_time = 0.0
        self.speculation: tuple[int, int, list[int]] | None = None
        self.tiers: tuple[int, int, str] | None = None
        self.received_at = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None
        self._no_output = form.no_output
        has_stops = bool(sampling.stop or sampling.stop_regex)
        self._live = form.live or has_stops
        plain = not (has_stops or form.no_output) and logprobs is None
        self.streams_plainly = form.live and form.interval == 1 and plain and tokenizer is not None
        """True if every token is a separate piece, which is only text."""
        self._pieces = PieceBuffer(form.interval)
        self._assembler: TextAssembler | None = None
        if tokenizer is not None:
            self._assembler = TextAssembler(
                tokenizer,
                stops=sampling.stop,
                patterns=sampling.stop_regex,
                trim=not sampling.no_stop_trim,
                skip_special_tokens=sampling.skip_special_tokens,
                keep=form.keep_special,
                prompt_ids=self.prompt_ids,
            )

    @property
    def text(self) -> str:
        """The whole text so far."""
        texts = self._texts
        if len(texts) > 1:
            texts[:] = ["".join(texts)]
        return texts[0] if texts else ""

    @property
    def beginnings(self) -> Beginnings | None:
        """`Tokenizer.beginnings`, for the marks of an output that has ended without a stop; None for others."""
        was_cut = self.finish is not None and self.finish["type"] != "stop"
        return self.tokenizer.beginnings if was_cut and self.tokenizer is not None else None

    def feed(self, delta: RequestDelta) -> None:
        """Adds a delta. `finish` is set once the sequence has ended."""
        now = time.monotonic()
        self.cached_tokens, self.retractions = delta.cached_tokens, delta.retractions
        self.queue_time = delta.queue_time
        self.speculation, self.tiers = delta.speculation, delta.tiers
        if delta.vector is not None and (kept := self.hidden or self.experts) is not None:
            kept.add(delta.vector)
        if delta.prompt_logprobs is not None and self.logprob_format is not None:
            extend(self.prompt_logprobs, self.logprob_format.render(delta.prompt_logprobs))
        ids, finish = delta.token_ids, delta.finish
        if self._no_output and (ids or finish):
            ids = []
            if finish is None or finish["type"] != "abort":
                finish = {"type": "length", "length": 0}
        text = ""
        if self._live and self._assembler is not None:
            text, used, matched = self._assemble(ids, finish)
            if matched is not None:
                ids = ids[:used]
                finish = {"type": "stop", "matched": matched}
        self.output_ids.extend(ids)
        logprobs = self._render(delta, len(ids))
        if finish is not None:
            self.finish, self.finished_at = finish, now
            if not self._live and self._assembler is not None:
                text = self._assemble(self.output_ids, finish)[0]
        if text:
            self._texts.append(text)
        if ids:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        self._pieces.add(Piece(self, text, list(ids), logprobs, finish))

    def take_text(self, delta: RequestDelta) -> str | None:
        """`feed` of a delta with only tokens (`inbox.is_plain`); returns the text of its piece: the hot path of
        streams. None if nothing was done: the piece would not be only text, or an earlier one was not taken."""
        ids, assembler = delta.token_ids, self._assembler
        if assembler is None or not self.streams_plainly or not self._pieces.is_empty or not ids:
            return None
        self.cached_tokens, self.retractions = delta.cached_tokens, delta.retractions
        text = assembler.push_plain(ids)
        self._texts.append(text)
        self.output_ids += ids
        self.last_token_at = now = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = now
        self._pieces.pass_by()
        return text

    def take_plain(self, delta: RequestDelta) -> Piece | None:
        """`feed` and then `take_piece`, for a delta with only tokens. Also None if the sequence has ended."""
        text = self.take_text(delta)
        if text is not None:
            return Piece(self, text, delta.token_ids, [], None)
        self.feed(delta)
        return None if self.finish is not None else self.take_piece()

    def _render(self, delta: RequestDelta, count: int) -> Columns:
        """Log-probabilities of the first `count` new tokens."""
        if self.logprob_format is None or delta.logprobs is None or not count:
            return []
        columns = self.logprob_format.render(delta.logprobs.part(0, count))
        self._num_logprobs += num_tokens(columns)
        if self._keep_logprobs:
            extend(self.output_logprobs, columns)
        return columns

    def _assemble(self, ids: list[int], finish: dict[str, Any] | None) -> tuple[str, int, str | None]:
        """New text, tokens used, and the stop string found among them."""
        assembler = self._assembler
        assert assembler is not None
        shown = ids
        if finish is not None and not self.sampling.no_stop_trim and ids:
            matched = finish.get("matched")
            if isinstance(matched, int) and ids[-1] == matched:
                shown = ids[:-1]
        text, used = assembler.push(shown)
        if assembler.matched is None and finish is not None:
            text += assembler.flush()
            used = len(ids)
        return text, used, assembler.matched

    def take_piece(self) -> Piece | None:
        """`PieceBuffer.take`."""
        return self._pieces.take()

    # -- SGLang's shapes

    def output(self) -> dict[str, Any]:
        """The whole output so far: {"text", "output_ids", "meta_info"}; no text without a tokenizer."""
        out: dict[str, Any] = {"text": self.text} if self.tokenizer is not None else {}
        out["output_ids"] = list(self.output_ids)  # a copy: the list keeps growing
        out |= self._prompt_shown()
        out["meta_info"] = self.meta_info() | self._logprob_info(self.prompt_logprobs, self.output_logprobs)
        return out

    def output_of(self, piece: Piece, *, with_prompt: bool) -> dict[str, Any]:
        """Only the new part of the output, for incremental streams."""
        out: dict[str, Any] = {"text": piece.text} if self.tokenizer is not None else {}
        out["output_ids"] = piece.token_ids
        out |= self._prompt_shown()
        shown = self.prompt_logprobs if with_prompt else []
        out["meta_info"] = self.meta_info() | self._logprob_info(shown, piece.logprobs)
        return out

    def _prompt_shown(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": list(self.prompt_ids)} if self.shows_prompt else {}

    def meta_info(self) -> dict[str, Any]:
        """Current `meta_info`, without log-probabilities."""
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.prompt_ids),
            "weight_version": self.weight_version,
            "total_retractions": self.retractions,
            "num_retractions": self.retractions,
            "completion_tokens": len(self.output_ids),
            "reasoning_tokens": 0 if self.reasoning is None else self.reasoning.of(self.output_ids),
            "cached_tokens": self.cached_tokens,
            "queue_time": self.queue_time,
        }
        if self.tiers is not None:
            meta["cached_tokens_details"] = self.cached_by_tier()
        meta |= meta_times(self)
        if self.request.routed_dp_rank is not None:
            meta["dp_rank"] = self.request.routed_dp_rank
        if self.hidden is not None and self.finish is not None:
            meta["hidden_states"] = self.hidden.shown(len(self.output_ids))
        if self.experts is not None and self.finish is not None:
            meta["routed_experts"] = self.experts.shown(len(self.output_ids))
        if self.speculation is not None:
            meta |= _speculation_info(*self.speculation)
        return meta

    def cached_by_tier(self) -> dict[str, Any]:
        """Cached prompt tokens by the tier of the KV cache that had them."""
        return _by_tier(self.cached_tokens, *(self.tiers or (0, 0, "")))

    def logprob_fields(self, columns: Columns) -> dict[str, Any] | None:
        """These log-probabilities as fields of the response; None if not requested."""
        return None if self.logprob_format is None else self.logprob_format.fields(columns)

    def _logprob_info(self, prompts: Columns, outputs: Columns) -> dict[str, Any]:
        """SGLang's fields of prompt and output."""
        fields = {
            f"{side}_{name}": value
            for side, columns in (("input", prompts), ("output", outputs))
            for name, value in (self.logprob_fields(columns) or {}).items()
        }
        return fields | {"output_token_logprobs_length": self._num_logprobs} if fields else {}


def _speculation_info(verify_ct: int, proposed: int, histogram: list[int]) -> dict[str, Any]:
    """SGLang's fields. `spec_correct_drafts_histogram[i]`: steps in which i drafts were accepted."""
    correct = sum(i * count for i, count in enumerate(histogram))
    return {
        "spec_verify_ct": verify_ct,
        "spec_accept_length": 1.0 + correct / verify_ct,
        "spec_accept_rate": correct / proposed if proposed else 0.0,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_correct_drafts_histogram": histogram,
    }


def _by_tier(cached: int, host: int, storage: int, backend: str) -> dict[str, Any]:
    """Cached tokens by the tier that held them."""
    details: dict[str, Any] = {"device": cached - host - storage, "host": host}
    return details | {"storage": storage, "storage_backend": backend} if backend else details
