# One server a replica and sglang-router in front of them on node 0, for serve.sbatch with REPLICAS=N.
# shellcheck shell=bash

: "${ROUTER:=$PYTHON -m sglang_router.launch_router}"
# without the circuit breaker, which counts errors of clients; ROUTER_FLAGS after these flags (docs/router.md)
ROUTER_RECOVERY="--health-check-interval-secs 1 --health-failure-threshold 2 --retry-max-retries 10 --disable-circuit-breaker"
: "${ROUTER_FLAGS:=--policy cache_aware}"

# serve_replicas FLAGS...: runs until the router ends, all replicas have failed for good, or the job is stopped; the exit
# code is in CODE. A replica that fails is restarted on its nodes, at most MAX_RESTARTS times; the others keep serving.
serve_replicas() {
  local nodes=() urls=() i own per=$((SLURM_JOB_NUM_NODES / REPLICAS))
  if ((SLURM_JOB_NUM_NODES % REPLICAS)); then
    echo "REPLICAS=$REPLICAS: $SLURM_JOB_NUM_NODES nodes cannot be divided by it" >&2
    return 2
  fi
  if ! $ROUTER --help >/dev/null 2>&1; then
    echo "no router: \`$ROUTER --help\` fails; pip install -e '.[router]', or set ROUTER to its command" >&2
    return 2
  fi
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  : "${MOE_ENGINE_DIST_SECRET:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
  export MOE_ENGINE_DIST_SECRET
  REPLICA_LOOPS=()
  for ((i = 0; i < REPLICAS; i++)); do
    own=("${nodes[@]:i * per:per}")
    urls+=("http://${own[0]}:$((PORT + 1))")
    keep_replica "$i" "$(IFS=,; echo "${own[*]}")" "$per" "$@" &
    REPLICA_LOOPS+=($!)
  done
  log "router: http://$SLURMD_NODENAME:$PORT, $REPLICAS replicas of $per nodes: ${urls[*]}"
  # shellcheck disable=SC2086
  $ROUTER --host 0.0.0.0 --port "$PORT" $ROUTER_RECOVERY $ROUTER_FLAGS --worker-urls "${urls[@]}" &
  ROUTER_PID=$!
  while [ -z "$STOPPING" ] && kill -0 "$ROUTER_PID" 2>/dev/null && some_loop_runs; do sleep 1; done
  CODE=0
  if [ -z "$STOPPING" ]; then
    CODE=1
    if some_loop_runs; then log "the router ended"; else wait "${REPLICA_LOOPS[0]}"; CODE=$?; fi
  fi
  kill -TERM "$ROUTER_PID" "${REPLICA_LOOPS[@]}" 2>/dev/null
  wait "$ROUTER_PID" "${REPLICA_LOOPS[@]}"
}

some_loop_runs() {
  local pid
  for pid in "${REPLICA_LOOPS[@]}"; do if kill -0 "$pid" 2>/dev/null; then return 0; fi; done
  return 1
}

# keep_replica NUMBER NODES COUNT FLAGS...: one server on these nodes, restarted after failures.
keep_replica() {
  local number=$1 list=$2 count=$3 restarts=0 code ranks layout=() step=''
  shift 3
  ranks=$((count * RANKS_PER_NODE))
  if ((ranks > 1)) && [ "${LAYOUT:-}" != flags ]; then layout=("${DEEPSEEK_LAYOUT[@]//RANKS/$ranks}"); fi
  trap 'STOPPING=1; if [ -n "$step" ]; then kill -TERM "$step" 2>/dev/null; fi' TERM
  while [ -z "$STOPPING" ]; do
    srun --export=ALL --nodes="$count" --nodelist="$list" --ntasks="$count" --ntasks-per-node=1 --cpu-bind=none \
      --kill-on-bad-exit=1 --wait=0 \
      "$MOE_ENGINE" serve --host 0.0.0.0 --port $((PORT + 1)) "${layout[@]}" "$@" &
    step=$!
    if [ -n "$STOPPING" ]; then kill -TERM "$step"; fi
    wait "$step"
    code=$?
    if [ -n "$STOPPING" ]; then wait "$step" 2>/dev/null; return 0; fi
    log "replica $number on $list ended with exit code $code"
    if ((code == 0 || code == 2 || restarts >= MAX_RESTARTS)); then return "$code"; fi
    restarts=$((restarts + 1)) step=''
    sleep "${RESTART_PAUSE:-5}"   # a signal is handled after it
  done
}
