"""One sequence on its way out: what the engine sends for it, gathered into text, tokens, log-probabilities, times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from moe_engine.engine.generate_input import LogprobOptions
from moe_engine.engine.messages import AddRequest, RequestDelta
from moe_engine.tokenizer.assembler import TextAssembler
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types import SamplingParams


@dataclass(slots=True)
class Piece:
    """What is new of a sequence since the piece before."""

    generation: Generation
    text: str
    token_ids: list[int]
    logprobs: list[Any]
    finish: dict[str, Any] | None


class Generation:
    """Gathers a sequence. Fed by `Frontend`, read by whoever answers the client.

    Args:
        rid: the client's id, which aborts, logs and answers use; `request.rid` is the engine's.
        index: its place among the sequences of the request, prompt-major.
        prompt_index: which prompt of the request it continues.
        live: text is wanted while tokens come (a stream, or stop strings); otherwise it is made once, at the end.
        interval: tokens between two pieces of a stream.
        observed: metrics and request log hear of it.
    """

    def __init__(
        self,
        request: AddRequest,
        sampling: SamplingParams,
        *,
        rid: str = "",
        index: int = 0,
        prompt_index: int = 0,
        logprobs: LogprobOptions | None = None,
        tokenizer: Tokenizer | None = None,
        keep_special: frozenset[int] = frozenset(),
        live: bool = True,
        interval: int = 1,
        prompt_text: str | None = None,
        no_output: bool = False,
        observed: bool = True,
        weight_version: str = "default",
    ) -> None:
        self.request = request
        self.rid = rid or request.rid
        self.prompt_ids = request.prompt_ids
        self.prompt_text = prompt_text
        self.sampling = sampling
        self.index = index
        self.prompt_index = prompt_index
        self.options = logprobs
        self.observed = observed
        self.weight_version = weight_version
        self.tokenizer = tokenizer
        self.text = ""
        self.output_ids: list[int] = []
        self.output_logprobs: list[Any] = []
        self.prompt_logprobs: list[Any] = []
        self.finish: dict[str, Any] | None = None
        self.cached_tokens = 0
        self.retractions = 0
        self.queue_time = 0.0
        self.speculation: tuple[int, int, list[int]] | None = None
        self.received_at = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None
        self._no_output = no_output
        self._interval = interval
        self._live = live or bool(sampling.stop)
        self._piece: Piece | None = None
        self._shown_any = False
        self._assembler: TextAssembler | None = None
        if tokenizer is not None:
            self._assembler = TextAssembler(
                tokenizer,
                stops=sampling.stop,
                trim=not sampling.no_stop_trim,
                skip_special_tokens=sampling.skip_special_tokens,
                keep=keep_special,
                prompt_ids=self.prompt_ids,
            )

    def feed(self, delta: RequestDelta) -> None:
        """Takes what a step brought. Afterwards `finish` tells whether the sequence is over."""
        now = time.monotonic()
        self.cached_tokens, self.retractions = delta.cached_tokens, delta.retractions
        self.queue_time = delta.queue_time
        self.speculation = delta.speculation
        if delta.prompt_logprobs:
            self.prompt_logprobs.extend(delta.prompt_logprobs)
        ids, logprobs, finish = delta.token_ids, delta.logprobs or [], delta.finish
        if self._no_output and (ids or finish):
            ids, logprobs = [], []
            if finish is None or finish["type"] != "abort":
                finish = {"type": "length", "length": 0}
        text = ""
        if self._live and self._assembler is not None:
            text, used, matched = self._assemble(ids, finish)
            if matched is not None:
                ids, logprobs = ids[:used], logprobs[:used]
                finish = {"type": "stop", "matched": matched}
        self.output_ids.extend(ids)
        self.output_logprobs.extend(logprobs)
        if finish is not None:
            self.finish, self.finished_at = finish, now
            if not self._live and self._assembler is not None:
                text = self._assemble(self.output_ids, finish)[0]
        self.text += text
        if ids:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        self._note(text, ids, logprobs, finish)

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

    def _note(self, text: str, ids: list[int], logprobs: list[Any], finish: dict[str, Any] | None) -> None:
        if self._piece is None:
            self._piece = Piece(self, text, list(ids), list(logprobs), finish)
        else:
            self._piece.text += text
            self._piece.token_ids += ids
            self._piece.logprobs += logprobs
            self._piece.finish = finish

    def take_piece(self) -> Piece | None:
        """What is to be shown now; None while a stream interval is not full."""
        piece = self._piece
        if piece is None or not (piece.token_ids or piece.finish):
            return None
        if piece.finish is None and self._shown_any and len(piece.token_ids) < self._interval:
            return None
        self._piece, self._shown_any = None, True
        return piece

    # -- SGLang's shapes

    def output(self) -> dict[str, Any]:
        """The whole answer so far: {"text", "output_ids", "meta_info"}; no text without a tokenizer."""
        out: dict[str, Any] = {"text": self.text} if self.tokenizer is not None else {}
        out["output_ids"] = list(self.output_ids)  # the list grows on; what was given out must not
        out["meta_info"] = self.meta_info(self.output_logprobs, with_prompt=True)
        return out

    def output_of(self, piece: Piece, *, with_prompt: bool) -> dict[str, Any]:
        """The answer's new part only, for incremental streams."""
        out: dict[str, Any] = {"text": piece.text} if self.tokenizer is not None else {}
        out["output_ids"] = piece.token_ids
        out["meta_info"] = self.meta_info(piece.logprobs, with_prompt=with_prompt)
        return out

    def meta_info(self, output_logprobs: list[Any], *, with_prompt: bool) -> dict[str, Any]:
        """`meta_info` as of now, with the given part of the output's log-probabilities."""
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.prompt_ids),
            "weight_version": self.weight_version,
            "total_retractions": self.retractions,
            "num_retractions": self.retractions,
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.cached_tokens,
            "queue_time": self.queue_time,
        }
        if self.finished_at is not None:
            meta["e2e_latency"] = self.finished_at - self.received_at
            if self.first_token_at is not None:
                meta["first_token_latency"] = self.first_token_at - self.received_at
        if self.request.routed_dp_rank is not None:
            meta["dp_rank"] = self.request.routed_dp_rank
        if self.speculation is not None:
            meta |= _speculation_info(*self.speculation)
        if self.options is not None:
            self._add_logprobs(meta, self.options, output_logprobs, self.prompt_logprobs if with_prompt else [])
        return meta

    def _add_logprobs(
        self, meta: dict[str, Any], options: LogprobOptions, outputs: list[Any], prompts: list[Any]
    ) -> None:
        for side, entries in (("input", prompts), ("output", outputs)):
            meta[f"{side}_token_logprobs"] = [self._entry(e[1], e[0]) for e in entries]
            if options.top:
                meta[f"{side}_top_logprobs"] = [self._rivals(e, 2) for e in entries]
            if options.token_ids:
                meta[f"{side}_token_ids_logprobs"] = [self._rivals(e, 3) for e in entries]
        meta["output_token_logprobs_length"] = len(self.output_logprobs)

    def _entry(self, logprob: float | None, token: int) -> list[Any]:
        with_text = self.options is not None and self.options.with_text and self.tokenizer is not None
        return [logprob, token, self.tokenizer.token_text(token) if with_text and self.tokenizer else None]

    def _rivals(self, entry: list[Any], place: int) -> list[Any] | None:
        """Log-probabilities of the best (place 2) or the asked (3) tokens; None where there are none."""
        return [self._entry(logprob, token) for token, logprob in entry[place]] or None


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
