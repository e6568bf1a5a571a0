"""From flags, model and machine to one frozen configuration with a reason for each choice. Imports no torch.

`prepare` reads the checkpoint, config.json and the machine, applies `workload_profiles`, and calls `resolve`, whose
result is `resolved_config`, with the decisions of `resolution_log` and the notes of `remarks`. Folders, each of which
imports only those above it:

- `inputs`: what a launch finds: machine, cluster launch, files of the checkpoint.
- `flags`: what flags decide or contradict on their own.
- `parallelism`: ranks, nodes, dispatcher, expert placement.
- `model`: what the model decides or excludes: dtypes, quantization, adapters, kinds of layers.
- `speculation`: the drafter.
- `memory`: the memory ledger; `sizing` fills it within `limit`, `refusal` is its error.
- `steps`: kernel rows, `step_limits`, captured and compiled steps; calls `memory.sizing`.
- `output`: readers of the result: `--explain`, flags of /server_info, scheduler limits, identity.
"""
