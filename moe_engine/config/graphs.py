"""Flags of CUDA graphs: which decode steps are captured before the first request."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.numbers import whole_number
from moe_engine.config.values import parse_count


def parse_sizes(text: str) -> str:
    """``8 1,4`` -> ``1 4 8``. Raises ValueError."""
    sizes = sorted({whole_number(word) for word in text.replace(",", " ").split()})
    if not sizes or sizes[0] < 1:
        raise ValueError("batch sizes are at least 1")
    return " ".join(map(str, sizes))


@dataclass(frozen=True)
class GraphArgs:
    disable_cuda_graph: bool = flag(
        False, "Run decode steps without CUDA graphs, kernel by kernel.", aliases=("--disable-decode-cuda-graph",)
    )
    disable_cuda_graph_padding: bool = flag(
        False,
        "Replay a CUDA graph only for steps of exactly its batch size; other steps run without a graph instead "
        "of being padded.",
    )
    cuda_graph_max_bs_decode: int | None = flag(
        None,
        "Largest decode batch size, in requests, that is captured; larger batches run without a graph. Left out: 8 to "
        "512 by memory of the GPU, at most the running requests.",
        old=("--cuda-graph-max-bs",),
        parse=parse_count,
        metavar="N",
    )
    cuda_graph_bs_decode: str | None = flag(
        None,
        "Batch sizes to capture, in requests. Left out: SGLang's list up to --cuda-graph-max-bs-decode.",
        old=("--cuda-graph-bs",),
        parse=parse_sizes,
        many=True,
        metavar="N",
    )
    cuda_graph_backend_decode: str | None = flag(
        None,
        "full: decode steps are captured whole; disabled: as --disable-cuda-graph. Left out: full.",
        choices=("full", "disabled"),
        unsupported={"breakable": "piecewise CUDA graphs", "tc_piecewise": "piecewise CUDA graphs of torch.compile"},
    )
