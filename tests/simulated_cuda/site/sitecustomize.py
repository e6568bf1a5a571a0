"""Simulated GPUs in every Python process that has this folder and the repository's root on PYTHONPATH, so that a whole
server can use them: ``PYTHONPATH=$PWD/tests/simulated_cuda/site:$PWD moe-engine serve --device cuda``."""

from tests.simulated_cuda.install import install

install()
