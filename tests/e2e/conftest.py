"""A checkpoint for tests of processes, whatever its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek V3, long answers."""
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("model"), seed=11, max_position_embeddings=8192)
