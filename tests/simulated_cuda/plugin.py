"""Pytest on simulated devices: ``pytest -p tests.simulated_cuda.plugin -m gpu tests``."""

from __future__ import annotations

from tests.simulated_cuda.install import install

install()
