"""The memory ledger: memory of each part, computed before it is allocated; the KV cache gets the rest.

GB are 2^30 bytes, as in SGLang's log lines.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1 << 30
DRAFT_WEIGHTS = "draft weights"
BUFFERS_ROW = "weight buffers"
GRAPHS_ROW = "CUDA graphs"
WINDOWS_ROW = "KV of windows"
STATES_ROW = "request states"
KEPT_ROW = "unfinished entries"
LORA_ROW = "LoRA slots"
LORA_HOST_ROW = "LoRA adapters"
WEIGHT_ROWS = ("weights", DRAFT_WEIGHTS)
STATIC_ROWS = (*WEIGHT_ROWS, BUFFERS_ROW, WINDOWS_ROW, STATES_ROW, KEPT_ROW, LORA_ROW)
"""Rows that --mem-fraction-static counts besides the KV cache."""

SLOT_TOKEN_BYTES = 4
"""Bytes of the token id that is stored with a KV slot, for penalties."""


def gb(num_bytes: float) -> str:
    """``17.25 GB``; small sizes in MB so that no row shows 0.00."""
    return f"{num_bytes / GB:.2f} GB" if abs(num_bytes) >= GB / 10 else f"{num_bytes / (1 << 20):.1f} MB"


@dataclass(frozen=True)
class LedgerRow:
    name: str
    num_bytes: int
    detail: str


@dataclass(frozen=True)
class MemoryLedger:
    """Memory of the engine on its device. The KV cache comes last and gets the rest below the limit.

    Attributes:
        rows: everything but KV.
        limit_bytes: limit of the sum of all rows and KV.
        limit_reason: origin of the limit.
        bytes_per_token: KV of one token in all layers, but not in windowed layers with a pool of their own.
        num_tokens: KV slots for requests (`max_total_num_tokens`); the pool has one more dummy page.
        page_size: tokens of a page.
        logits_rows: max rows of logits at once; the worker computes and samples more rows in several passes.
    """

    rows: tuple[LedgerRow, ...]
    limit_bytes: int
    limit_reason: str
    bytes_per_token: int
    num_tokens: int
    page_size: int
    logits_rows: int = 0
    num_window_slots: int = 0
    """Tokens of the pool of windowed layers; 0: these layers have no pool of their own. Its memory is a row."""
    host_tier_tokens: int = 0
    """Tokens of the host-RAM tier of the KV cache; on a CPU its memory is a row."""
    host_snapshots: int = 0
    """States of cached prefixes that the tier can hold."""
    host_window_slots: int = 0
    """Tokens of the tier's pool of windowed layers."""
    host_rows: tuple[LedgerRow, ...] = ()
    """Memory of the host in addition to that of a GPU; not part of the sum."""

    @property
    def fixed_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def weight_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows if row.name in WEIGHT_ROWS)

    @property
    def static_bytes(self) -> int:
        """Weights and KV."""
        return self.kv_bytes + sum(row.num_bytes for row in self.rows if row.name in STATIC_ROWS)

    def bytes_of(self, name: str) -> int:
        """Sum of the rows with that name; 0 if there is none."""
        return sum(row.num_bytes for row in self.rows if row.name == name)

    @property
    def kv_bytes(self) -> int:
        return (self.num_tokens + self.page_size) * self.bytes_per_token

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes

    @property
    def spare_bytes(self) -> int:
        return self.limit_bytes - self.total_bytes

    def all_rows(self) -> tuple[LedgerRow, ...]:
        detail = f"{self.num_tokens} tokens x {self.bytes_per_token} B, and a dummy page of {self.page_size}"
        return (*self.rows, LedgerRow("KV cache", self.kv_bytes, detail))

    def lines(self) -> list[str]:
        """An aligned table, one line a row, sum and limit below."""
        rows = [
            *self.all_rows(),
            LedgerRow("sum", self.total_bytes, ""),
            LedgerRow("limit", self.limit_bytes, self.limit_reason),
            LedgerRow("left over", self.spare_bytes, ""),
            *(LedgerRow(f"host: {row.name}", row.num_bytes, row.detail) for row in self.host_rows),
        ]
        name = max(len(row.name) for row in rows)
        size = max(len(gb(row.num_bytes)) for row in rows)
        return [f"{row.name:<{name}}  {gb(row.num_bytes):>{size}}  {row.detail}".rstrip() for row in rows]

    def sum_text(self) -> str:
        """``weights 640.00 GB + activations 1.20 GB + ...`` without KV, largest first, nothing below 1 MB."""
        ordered = sorted(self.rows, key=lambda row: -row.num_bytes)
        return " + ".join(f"{row.name} {gb(row.num_bytes)}" for row in ordered if row.num_bytes >= 1 << 20)


def tokens_that_fit(num_bytes: int, bytes_per_token: int, page_size: int) -> int:
    """KV slots, a multiple of the page size, that fit into `num_bytes` with the dummy page; 0 if none do."""
    tokens = num_bytes // max(1, bytes_per_token) - page_size
    return max(0, tokens - tokens % page_size)


def slot_table_bytes(max_running_requests: int, row_width: int) -> int:
    """int32 [rows, width]: the KV slot of every position of every running request."""
    return max_running_requests * row_width * 4


def slot_tables(windows: bool, drafts: bool) -> tuple[str, ...]:
    """Contents of the tables of `slot_table_bytes` each. windows: layers with a window have a pool of their own."""
    return "slots", *["window slots"] * windows, *["tokens"] * drafts
