"""Parallel topology: the size of every axis, each rank's index on it, and checks of the model's divisibility.

The ranks of one model are numbered from 0 to tp_size - 1; adjacent ranks form the innermost groups. Attention is
sharded by heads inside an attention group (attn_tp), and every attention group has its own requests (attn_dp). Experts
are distributed over the expert-parallel axis (ep), and each is sharded by width inside a MoE group (moe_tp). No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.errors import ConfigError

RankLists = list[list[int]]


@dataclass(frozen=True)
class ModelWidths:
    """Sharded widths of a model. 0: the model has no such part.

    Attributes:
        num_kv_heads: of each kind of layers; (): one latent for all heads (MLA), which is no limit.
        dense_width: of the dense feed-forward layers.
        states: channels or heads of each sharded state of a request.
        block: channels that cannot be split: 128 if a kernel keeps block-FP8 weights, 1 if they are dequantized at
            load.
        latent_width: of the space of routed experts, if they have one of their own.
        output_groups: groups of attention heads with a projection of their own; 0: all heads have one projection.
    """

    num_heads: int
    num_kv_heads: tuple[int, ...]
    dense_width: int = 0
    num_experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    block: int = 1
    states: tuple[int, ...] = ()
    latent_width: int = 0
    output_groups: int = 0


@dataclass(frozen=True)
class Topology:
    """The sizes of a model's axes; a single process is every axis at size 1.

    Attributes:
        tp_size: ranks of the model (``--tp-size``).
        attn_dp_size: groups of ranks with separate requests (``--attn-dp-size``).
        ep_size: ranks that the experts are distributed over (``--ep-size``).
        moe_dense_tp_size: ranks that shard a dense layer: None for all, 1 for none: each rank runs whole dense
            layers on its share of the tokens (``--moe-dense-tp-size``).
        enable_dp_lm_head: the head is sharded inside an attention group only (``--enable-dp-lm-head``).
        moe_a2a_backend: dispatch backend (``--moe-a2a-backend``); with ``none`` every rank processes all tokens
            instead.
        num_nodes: hosts, with equal rank counts (``--nnodes``).

    Raises:
        ConfigError: the sizes are inconsistent; the message has the flags and valid sizes.
    """

    tp_size: int = 1
    attn_dp_size: int = 1
    ep_size: int = 1
    moe_dense_tp_size: int | None = None
    enable_dp_lm_head: bool = False
    moe_a2a_backend: str = "none"
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if self.tp_size < 1:
            raise ConfigError(f"--tp-size {self.tp_size}: a model has at least one rank")
        for flag, size in (
            ("--attn-dp-size", self.attn_dp_size),
            ("--ep-size", self.ep_size),
            ("--nnodes", self.num_nodes),
        ):
            if size < 1 or self.tp_size % size:
                raise ConfigError(
                    f"{flag} {size} does not divide --tp-size {self.tp_size}; {_nearest(size, self.tp_size)} would"
                )
        if self.moe_dense_tp_size not in (None, 1, self.tp_size):
            raise ConfigError(
                f"--moe-dense-tp-size {self.moe_dense_tp_size}: dense layers are sharded over all ranks (omit the "
                f"flag, or {self.tp_size}) or not at all (1)"
            )
        if self.travels and self.ep_size != self.tp_size:
            raise ConfigError(
                f"--moe-a2a-backend {self.moe_a2a_backend} dispatches tokens between all ranks, so --ep-size must be "
                f"--tp-size {self.tp_size}, not {self.ep_size}; or use --moe-a2a-backend none"
            )
        if self.enable_dp_lm_head and self.attn_dp_size == 1:
            raise ConfigError("--enable-dp-lm-head needs DP attention: an --attn-dp-size above 1")

    @property
    def attn_tp_size(self) -> int:
        """Ranks of an attention group."""
        return self.tp_size // self.attn_dp_size

    @property
    def moe_tp_size(self) -> int:
        """Ranks that shard an expert."""
        return self.tp_size // self.ep_size

    @property
    def travels(self) -> bool:
        """True if tokens are dispatched to their experts' ranks, instead of being processed by all ranks."""
        return self.moe_a2a_backend != "none"

    @property
    def cuts_dense(self) -> bool:
        """True if dense layers are sharded over all ranks."""
        return self.moe_dense_tp_size != 1 or self.tp_size == 1

    # -- a rank's index on each axis

    def attn_tp_rank(self, rank: int) -> int:
        return rank % self.attn_tp_size

    def attn_dp_rank(self, rank: int) -> int:
        return rank // self.attn_tp_size

    def ep_rank(self, rank: int) -> int:
        return rank // self.moe_tp_size

    # -- the groups, as lists of ranks of the world

    def attn_tp_groups(self) -> RankLists:
        """Ranks with the same requests."""
        return _neighbors(self.tp_size, self.attn_tp_size)

    def moe_tp_groups(self) -> RankLists:
        """Ranks with the same experts."""
        return _neighbors(self.tp_size, self.moe_tp_size)

    def ep_groups(self) -> RankLists:
        """Ranks that together hold all experts, in expert order."""
        return _strided(self.tp_size, self.moe_tp_size)

    def node_groups(self) -> RankLists:
        """Ranks of one host."""
        return _neighbors(self.tp_size, self.tp_size // self.num_nodes)

    def rail_groups(self) -> RankLists:
        """Ranks with the same local rank, one per host."""
        return _strided(self.tp_size, self.tp_size // self.num_nodes)

    def check(self, model: ModelWidths) -> None:
        """Checks that the model can be sharded this way.

        Raises:
            ConfigError: with the flags, the model's size and the nearest valid sizes.
        """
        attn, moe = self.attn_tp_size, self.moe_tp_size
        groups = [n for n in range(1, self.tp_size + 1) if self.tp_size % n == 0]
        split = model.num_heads, *model.states
        able = [n for n in groups if all(count % (self.tp_size // n) == 0 for count in split)]
        nearest = min(able, key=lambda n: abs(n - self.attn_dp_size))
        way_out = f"with --tp-size {self.tp_size}: --attn-dp-size {nearest}"
        _check_divides(attn, model.num_heads, "attention heads", "--tp-size / --attn-dp-size", way_out)
        for width in model.states:
            _check_divides(attn, width, "channels or heads of a state", "--tp-size / --attn-dp-size", way_out)
        for kv_heads in model.num_kv_heads:
            if kv_heads % attn and attn % kv_heads:
                raise ConfigError(
                    f"{kv_heads} KV heads can neither be divided over {attn} ranks (--tp-size / --attn-dp-size) nor "
                    f"replicated evenly on them; {_nearest(attn, kv_heads)} divide, a multiple of {kv_heads} replicates"
                )
        if model.output_groups % attn and attn % max(1, model.output_groups):
            raise ConfigError(
                f"{model.output_groups} groups of attention heads (o_groups) can neither be divided over {attn} ranks "
                f"(--tp-size / --attn-dp-size) nor have equal numbers of ranks; {_nearest(attn, model.output_groups)} "
                f"divide them; or --attn-dp-size {self.tp_size}"
            )
        if self.cuts_dense:
            _check_width(
                self.tp_size, model.dense_width, model.block, "dense layers", "--tp-size", "--moe-dense-tp-size 1"
            )
        _check_divides(
            self.ep_size, model.num_experts, "experts", "--ep-size", "or --ep-num-redundant-experts to fill up"
        )
        _check_width(moe, model.expert_width, model.block, "experts", "--tp-size / --ep-size", "a larger --ep-size")
        if not self.travels:
            _check_width(
                self.tp_size, model.shared_width, model.block, "shared experts", "--tp-size", "--moe-a2a-backend"
            )
            latent = "the latent space of routed experts"
            _check_width(self.tp_size, model.latent_width, 1, latent, "--tp-size", "--moe-a2a-backend")


def _check_divides(size: int, total: int, what: str, flag: str, way_out: str) -> None:
    if total and total % size:
        raise ConfigError(
            f"{total} {what} cannot be split evenly over {size} ranks ({flag}); {_nearest(size, total)} can; {way_out}"
        )


def _check_width(size: int, width: int, block: int, what: str, flag: str, way_out: str) -> None:
    if not width or (width % size == 0 and width // size % block == 0):
        return
    blocks = "" if block == 1 else f" in blocks of {block}"
    could = _nearest(size, width // block) if width % block == 0 else "1"
    raise ConfigError(
        f"{what} of width {width} cannot be split evenly over {size} ranks{blocks} ({flag}); {could} can; or {way_out}"
    )


def _nearest(size: int, total: int) -> str:
    """The divisors of `total` next to `size`, as text: ``2 or 4``."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    below, above = [n for n in divisors if n < size], [n for n in divisors if n > size]
    return " or ".join(str(n) for n in (*below[-1:], *above[:1]))


def _neighbors(total: int, size: int) -> RankLists:
    return [list(range(start, start + size)) for start in range(0, total, size)]


def _strided(total: int, step: int) -> RankLists:
    return [list(range(first, total, step)) for first in range(step)]
