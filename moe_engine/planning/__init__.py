"""From flags, model and machine to one frozen configuration with a reason for each choice. Imports no torch.

`prepare` reads the checkpoint (`checkpoint`, `draft_model`), config.json and the machine (`machine`, `hardware`,
`cluster_env`) and calls `resolve`, whose parts are:

- Flags alone: `validate`, `validate_server`, `image_flags`, `workload_profiles`.
- A group of values each: `resolve_*`, with `draft_tree`, `step_limits`, `weight_offload`, `quantization`.
- Flags that a kind of model excludes: `sparse_attention`, `residual_streams`, `state_memory`, `resolve_pooling`,
  `eagle_checks`.
- The memory ledger: `sizing` (inputs: `sizing_input`) fills `ledger` with the rows of `ledger_rows` and `*_memory`,
  within `memory_limit` and `tier_fit`; `memory_refusal` is the error.
- The result: `resolved_config`, with the decisions of `resolution_log` and the notes of `remarks`; `explain`,
  `launch_flags`, `scheduler_limits` and `weights_identity` read it.
"""
