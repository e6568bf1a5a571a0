"""The shape of draft trees: depth, branches and nodes by the speculative flags.

The root is the last accepted token; `topk` nodes are kept at each of `steps` depths.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.args import EngineArgs
from moe_engine.config.field import option_of
from moe_engine.config.speculative import AUTO
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.models.config_sections.block import BlockConfig
from moe_engine.planning.resolution_log import Record

MAX_DRAFT_TOKENS = 64
AUTO_MAX_STEPS = 6
NGRAM_STEPS = 4
DEFAULT_TREE = (3, 1, 4)
TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


@dataclass(frozen=True)
class Tree:
    """Depth, branches per depth and nodes (the root included); `auto_depth`: the depth is chosen for each step."""

    steps: int
    topk: int
    nodes: int
    auto_depth: bool = False


def resolve_tree(args: EngineArgs, method: str, block: BlockConfig | None, record: Record) -> Tree:
    """The tree of the flags, or the default of the drafter. Raises ConfigError: sizes that do not fit each other."""
    flags = args.speculative
    steps, topk = flags.speculative_num_steps, flags.speculative_eagle_topk
    nodes = flags.speculative_num_draft_tokens
    _check_least(topk, nodes)
    if method == "ngram" and topk is not None and topk > 1:
        raise NotAvailableYet(
            f"--speculative-eagle-topk {topk} with NGRAM: not supported yet: n-gram draft trees; use 1"
        )
    if block is not None:
        _check_block(block, topk)
    if steps == AUTO:
        tree = _auto_tree(topk, nodes, AUTO_MAX_STEPS if block is None else block.max_drafts, record)
    elif method == "ngram":
        return _chain(steps, nodes, NGRAM_STEPS, "a short chain", "an n-gram match has one continuation", record)
    elif block is not None:
        reason = f"the drafts of a block of {block.size} tokens"
        tree = _chain(steps, nodes, block.max_drafts, reason, "a block is a chain", record)
    else:
        return _tree_of_flags(steps, topk, nodes, record)
    if block is not None and tree.steps > block.max_drafts:
        raise ConfigError(
            f"--speculative-num-steps {tree.steps}: the blocks of {block.size} tokens of the {block.kind} have "
            f"{block.max_drafts} drafts; use at most {_chain_flags(block.max_drafts)}"
        )
    return tree


def _check_block(block: BlockConfig, topk: int | None) -> None:
    if topk is not None and topk > 1:
        raise ConfigError(f"--speculative-eagle-topk {topk}: a {block.kind} drafts chains; use 1")


def _tree_of_flags(steps: str | None, topk: int | None, nodes: int | None, record: Record) -> Tree:
    missing = [option_of(name) for name, value in zip(TREE, (steps, topk, nodes)) if value is None]
    if len(missing) == len(TREE):
        reason = "SGLang's 3, 1, 4 for DeepSeek models and for draft models"
        for name, value in zip(TREE, DEFAULT_TREE):
            record.note(name, value, reason)
        return Tree(*DEFAULT_TREE)
    if steps is None or topk is None or nodes is None:
        raise ConfigError(_incomplete(steps, nodes, missing))
    return _given_tree(int(steps), topk, nodes, record)


def _check_least(topk: int | None, nodes: int | None) -> None:
    if topk is not None and topk < 1:
        raise ConfigError(f"--speculative-eagle-topk {topk}: must be at least 1 (1: a chain)")
    if nodes is not None and nodes < 2:
        raise ConfigError(
            f"--speculative-num-draft-tokens {nodes}: must be at least 2, the last accepted token and a draft"
        )
    if nodes is not None and nodes > MAX_DRAFT_TOKENS:
        raise ConfigError(f"--speculative-num-draft-tokens {nodes}: must be at most {MAX_DRAFT_TOKENS}")


def _incomplete(steps: str | None, nodes: int | None, missing: list[str]) -> str:
    depth = int(steps) if steps not in (None, "0") else (nodes or NGRAM_STEPS + 1) - 1
    return (
        f"{' and '.join(missing)} missing: give --speculative-num-steps, --speculative-eagle-topk and "
        f"--speculative-num-draft-tokens together or none of them; {_chain_flags(depth)} draft a chain"
    )


def _chain_flags(depth: int) -> str:
    return f"--speculative-num-steps {depth} --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"


def _auto_tree(topk: int | None, nodes: int | None, most: int, record: Record) -> Tree:
    if topk is not None and topk > 1:
        raise ConfigError(
            f"--speculative-num-steps auto with --speculative-eagle-topk {topk}: auto chooses the length of a chain; "
            "use topk 1, or give the number of steps"
        )
    steps = most if nodes is None else nodes - 1
    record.note("speculative_num_steps", steps, f"each step drafts 0 to {steps} tokens, by the acceptance so far")
    if topk is None:
        record.note("speculative_eagle_topk", 1, "auto steps make a chain")
    if nodes is None:
        record.note("speculative_num_draft_tokens", steps + 1, "max steps + 1")
    return Tree(steps, 1, steps + 1, auto_depth=True)


def _chain(steps: str | None, nodes: int | None, default: int, reason: str, why_chain: str, record: Record) -> Tree:
    """A chain, whose length either flag may give.

    Args:
        default: its drafts if none does, with the reason.
        why_chain: reason for one child of each token.
    """
    depth = int(steps) if steps is not None else default if nodes is None else nodes - 1
    if steps is None:
        record.note("speculative_num_steps", depth, reason if nodes is None else "draft tokens - 1")
    if nodes is None:
        record.note("speculative_num_draft_tokens", depth + 1, "steps + 1")
    record.note("speculative_eagle_topk", 1, why_chain)
    return _given_tree(depth, 1, depth + 1 if nodes is None else nodes, record)


def _given_tree(steps: int, topk: int, nodes: int, record: Record) -> Tree:
    if steps < 1:
        raise ConfigError(
            "--speculative-num-steps 0: must be at least 1; leave out --speculative-algorithm to disable drafts"
        )
    if topk == 1 and nodes != steps + 1:
        record.remark(
            f"--speculative-num-draft-tokens is {steps + 1}, not {nodes}: a chain (--speculative-eagle-topk 1) of "
            f"{steps} steps always has this size"
        )
        nodes = record.note("speculative_num_draft_tokens", steps + 1, "steps + 1, as topk is 1")
    if nodes > MAX_DRAFT_TOKENS:
        raise ConfigError(f"--speculative-num-steps {steps}: at most {MAX_DRAFT_TOKENS - 1} in a chain")
    most = 1 + topk + (steps - 1) * topk**2  # the first depth has topk nodes, each later one topk for each kept
    if nodes > most:
        raise ConfigError(
            f"--speculative-num-draft-tokens {nodes}: {steps} steps of topk {topk} have at most {most} tokens, the "
            f"root included; use {most}, or more --speculative-num-steps"
        )
    return Tree(steps, topk, nodes)
