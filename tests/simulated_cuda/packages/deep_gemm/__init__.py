"""The emulated DeepGEMM as an installed package, for Hopper. OLD: a build whose products take no group ends."""

import os

from tests.kernels.vendors.deep_gemm_emulator import DeepGemmEmulator
from tests.simulated_cuda import libraries

OLD = "EMULATED_DEEP_GEMM_OLD"

libraries.install()
globals().update(vars(DeepGemmEmulator(9, takes_ends=OLD not in os.environ).module), __name__="deep_gemm")
