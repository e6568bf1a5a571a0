# Settings of this cluster, read by every script of this folder. Values that are already set take precedence, so
# `NIC=ib0 sbatch slurm/serve.sbatch` needs no edit; put settings for all jobs here.
# shellcheck shell=bash

# -- the program: from the environment made by `make serve` in this repository, else from $VIRTUAL_ENV, else from PATH
if [ -z "${MOE_ENGINE:-}" ]; then
  for MOE_ENGINE in "$REPOSITORY/.venv/bin/moe-engine" "${VIRTUAL_ENV:-}/bin/moe-engine" "$(command -v moe-engine)"; do
    if [ -x "$MOE_ENGINE" ]; then break; fi
  done
fi
if ! MOE_ENGINE=$(command -v "${MOE_ENGINE:-moe-engine}"); then
  echo "no moe-engine in $REPOSITORY/.venv/bin, \$VIRTUAL_ENV/bin or PATH, nor as \$MOE_ENGINE: run \`make serve\` once in" \
    "$REPOSITORY, or submit by: MOE_ENGINE=/path/to/bin/moe-engine sbatch ..." >&2
  return 2
fi
# its Python: in the same folder, else from its shebang line
: "${PYTHON:=$(dirname "$MOE_ENGINE")/python}"
if ! command -v "$PYTHON" >/dev/null; then PYTHON=$(sed -n '1s/^#! *\([^ ]*\).*/\1/p' "$MOE_ENGINE"); fi
if ! command -v "$PYTHON" >/dev/null; then PYTHON=python3; fi
export MOE_ENGINE PYTHON

# -- rendezvous: node 0 is the first host of the step; its port is derived from the numbers of job, step and restart.
# Set these if other nodes must use another name or port for it, e.g. its InfiniBand name.
# export MASTER_ADDR=$(hostname)-ib MASTER_PORT=29500

# -- network interface for addresses and small messages between nodes (`ip -br addr`). Empty: the route to node 0.
: "${NIC:=}"
if [ -n "$NIC" ]; then
  export GLOO_SOCKET_IFNAME=$NIC NCCL_SOCKET_IFNAME=$NIC NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=$NIC
fi

# -- InfiniBand adapters for tensors (`ibstat -l`): a prefix such as mlx5, or a list such as mlx5_0,mlx5_1. Empty: all.
: "${HCA:=}"
if [ -n "$HCA" ]; then
  export NCCL_IB_HCA=$HCA
  # DeepEP: the rate of one adapter decides how many multiprocessors send; of a prefix the engine takes the first
  case ${HCA%%,*} in *_[0-9]*) nic=${HCA%%,*}; export EP_NIC_NAME=${EP_NIC_NAME:-${nic%%:*}} ;; esac
  case $HCA in *,*) export NVSHMEM_HCA_LIST=$HCA ;; *) export NVSHMEM_HCA_PREFIX=$HCA ;; esac
fi
# RoCE only: index of the RoCE v2 entry in the adapter's GID table (`show_gids`; often 3).
: "${GID_INDEX:=}"
if [ -n "$GID_INDEX" ]; then
  export NCCL_IB_GID_INDEX=$GID_INDEX NVSHMEM_IB_GID_INDEX=$GID_INDEX
fi

# -- DeepEP 2 between nodes sends through NCCL's GIN (the GPU rings the adapter's doorbell): ConnectX-7 or later, a
# current OFED, and nvidia.ko with PeerMappingOverride=1 or gdrcopy. On one node the engine sets EP_DISABLE_GIN=1.
# NVSHMEM is the transport of --deepep-version 1 and of --moe-a2a-backend nvshmem; DeepEP 1 enables IBGDA, which has the
# same needs. `ibrc` works without it, but slower.
: "${NVSHMEM_IB_ENABLE_IBGDA:=1}"
: "${NVSHMEM_QP_DEPTH:=1024}"   # at least twice (--max-dispatch-tokens-per-rank + 1)
export NVSHMEM_IB_ENABLE_IBGDA NVSHMEM_QP_DEPTH

# -- logs: NCCL logs only problems; NCCL_DEBUG=INFO logs the adapters it uses
: "${NCCL_DEBUG:=WARN}"
export NCCL_DEBUG
