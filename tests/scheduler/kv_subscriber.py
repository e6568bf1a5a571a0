"""An independent subscriber of KV events: types of vLLM's messages, and an index of blocks."""

from __future__ import annotations

from typing import Any

import msgspec


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class BlockIndex:
    """`blocks`: hash -> (hash of the parent block, tokens)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert parent is None or parent in self.blocks
        for i, block in enumerate(event.block_hashes):
            assert block not in self.blocks
            self.blocks[block] = parent, tuple(event.token_ids[i * size : (i + 1) * size])
            parent = block

    def prefixes(self) -> list[tuple[int, ...]]:
        """The tokens up to the end of each block, sorted."""

        def path(block: int | None) -> tuple[int, ...]:
            if block is None:
                return ()
            parent, tokens = self.blocks[block]
            return (*path(parent), *tokens)

        return sorted(map(path, self.blocks))
