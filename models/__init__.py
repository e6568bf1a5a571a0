"""Models: configs, the registry of architectures, weight loading, layers and the model classes. Imports no torch.

- Configs: `registry` has the parser and the class of each architecture. `config` and `*_config` say what a model is,
  `config_*` parse config.json (`config_fields` reads fields, `config_families` has the common parts).
- Checkpoints: `checkpoint_files` reads headers, `checkpoint_names` and `*_names` rename tensors; `formats/` and `gguf/`
  have the stored forms.
- Needed tensors: `tensors`, `tensor_names` and `*_tensors` list them; `header_check` compares; `sizes`, `step_memory`,
  `widths` and `sharding` count and divide.
- Loading: `loader`, `weights`, `read_ahead`, `load_threads`; parts of weights: `partial_weights`, `received_tensors`.
- Classes: one file for each kind of model (`dense`, `deepseek`, ...), of `layers/` and `vision/`; layers that draft:
  `draft_layers` is the interface, `mtp*`, `stream_mtp`, `stream_block`, `eagle` and `block_head` implement it.
"""

from moe_engine.models.activation_dtype import activation_dtype
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.registry import register

__all__ = ["ModelConfig", "activation_dtype", "load_model_config", "register"]
