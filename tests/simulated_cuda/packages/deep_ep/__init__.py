"""The emulated DeepEP as an installed package: both generations, as in the pinned wheel."""

from tests.distributed.dispatch.deepep_emulator import Buffer as Buffer
from tests.distributed.dispatch.deepep_emulator import ElasticBuffer as ElasticBuffer
from tests.distributed.dispatch.deepep_emulator import topk_idx_t as topk_idx_t
from tests.simulated_cuda import libraries

libraries.install()
