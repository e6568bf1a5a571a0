# The server's job step, for serve.sbatch and bench.sbatch.
# shellcheck shell=bash

: "${PORT:=30000}"
: "${RANKS_PER_NODE:=${SLURM_GPUS_ON_NODE:-1}}"

# The layout of DeepSeek's models over all ranks; RANKS is their number.
DEEPSEEK_LAYOUT=(--tp-size RANKS --attn-dp-size RANKS --ep-size RANKS --moe-a2a-backend auto
  --moe-dense-tp-size 1 --enable-dp-lm-head)

# start_server FLAGS...: the layout of DeepSeek models over all ranks, then the user's flags; a later value overrides an
# earlier one. LAYOUT=flags: the user's flags alone, as `moe-engine plan --workload` prints them.
# `moe-engine serve` reads the node ranks from the step's environment.
start_server() {
  local ranks=$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE)) layout=()
  if ((ranks > 1)) && [ "${LAYOUT:-}" != flags ]; then
    layout=("${DEEPSEEK_LAYOUT[@]//RANKS/$ranks}")
  fi
  start_step "$MOE_ENGINE" serve --host 0.0.0.0 --port "$PORT" "${layout[@]}" "$@"
}

# wait_ready: waits until the server is healthy; fails if it exits first.
wait_ready() {
  while step_runs; do
    if "$PYTHON" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' \
      "http://localhost:$PORT/health" 2>/dev/null; then
      return 0
    fi
    sleep 1
  done
  return 1
}
