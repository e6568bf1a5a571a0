"""Batch log lines in SGLang's format, which tools parse. Pure functions."""

from __future__ import annotations

from moe_engine.scheduler.events import PlanFacts


def prefill_line(facts: PlanFacts) -> str:
    """The line of a prefill batch."""
    return (
        f"Prefill batch. #new-seq: {facts.new_seq}, #new-token: {facts.new_token}, "
        f"#cached-token: {facts.cached_token}, token usage: {facts.token_usage:.2f}, "
        f"#running-req: {facts.num_running}, #queue-req: {facts.num_queued}, "
        + (f"#host-hit: {facts.host_hit}, #storage-hit: {facts.storage_hit}, " if facts.has_tiers else "")
    )


def decode_line(
    facts: PlanFacts, gen_throughput: float, *, cuda_graph: bool = False, accept_len: float | None = None
) -> str:
    """The line every `--decode-log-interval` decode iterations. `gen_throughput`: tokens/s since the last one."""
    accepted = "" if accept_len is None else f"accept len: {accept_len:.2f}, "
    return (
        f"Decode batch. #running-req: {facts.num_decodes}, #token: {facts.num_used}, "
        f"token usage: {facts.token_usage:.2f}, {accepted}cuda graph: {cuda_graph}, "
        f"gen throughput (token/s): {gen_throughput:.2f}, #queue-req: {facts.num_queued}, "
    )


def retract_line(num_retracted: int, old_ratio: float, new_ratio: float) -> str:
    return (
        f"KV cache pool is full. Retract requests. #retracted_reqs: {num_retracted}, "
        f"#new_token_ratio: {old_ratio:.4f} -> {new_ratio:.4f}"
    )


def flush_refused_line(num_queued: int, num_running: int) -> str:
    return (
        f"Cache not flushed because there are pending requests. #queue-req: {num_queued}, #running-req: {num_running}"
    )


FLUSHED_LINE = "Cache flushed successfully!"
