# Runs one step over all nodes of the job and evaluates its end, for the scripts of this folder.
# shellcheck shell=bash

: "${MAX_RESTARTS:=3}"
: "${STEP_GRACE:=10}"   # seconds until the other tasks of the step must exit after node 0's part
STOPPING=''

# scancel sends SIGTERM to the program on all nodes and to this script, which then waits for the program.
trap 'STOPPING=1' TERM

log() { echo "[$(date '+%F %T') $SLURMD_NODENAME] $*"; }

# start_step COMMAND...: one task per node, in the background.
start_step() {
  # The secret of the sockets between this job's nodes. It is passed in the environment of the tasks, which neither
  # `scontrol show job` nor `ps` shows to other users.
  : "${MOE_ENGINE_DIST_SECRET:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
  export MOE_ENGINE_DIST_SECRET
  NODE0_CODE=$(mktemp)   # this script also runs on node 0
  export NODE0_CODE
  # The shell around the command keeps the task alive on SIGTERM until the program has drained. The shell also maps the exit
  # code of a program killed by SIGTERM after another node's failure to 0, so that this code does not hide the other node's.
  # No CPU binding: the program's ranks divide the node's cores among themselves. shellcheck disable=SC2016
  srun --export=ALL --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit="${KILL_ON_BAD_EXIT:-1}" --wait=0 bash -c '
    trap "terminated=1" TERM
    "$@"
    code=$?
    if [ "$code" = 143 ] && [ -n "$terminated" ]; then code=0; fi
    [ "$SLURM_NODEID" != 0 ] || echo "$code" >"$NODE0_CODE"
    exit "$code"' step "$@" &
  STEP=$!
}

# step_runs: whether node 0's part of the step still runs.
step_runs() { kill -0 "$STEP" 2>/dev/null && [ ! -s "$NODE0_CODE" ]; }

# wait_step: waits for the end of the step; its exit code is in CODE. srun waits until SLURM detects a dead node, which takes
# SlurmdTimeout (300 s by default); the program detects it within seconds, so node 0's exit is sufficient.
wait_step() {
  local late=0
  while kill -0 "$STEP" 2>/dev/null; do
    if [ -s "$NODE0_CODE" ] && ((late++ > STEP_GRACE)); then
      log "srun still waits for other nodes: continuing without them"
      { kill -KILL "$STEP"; wait "$STEP"; } 2>/dev/null
      break
    fi
    sleep 1
  done
  wait "$STEP" 2>/dev/null
  CODE=$?
  if ((late > STEP_GRACE)); then
    CODE=$(cat "$NODE0_CODE")
    if ((CODE == 0)) && [ -z "$STOPPING" ]; then CODE=1; fi
  fi
  rm -f "$NODE0_CODE"
}

# name_lost_nodes: logs the nodes of the job that do not respond. Probes SLURM's daemon on them, because a new step may wait
# for processes of the previous step.
name_lost_nodes() {
  local node address port asked=()
  port=$(scontrol show config | sed -n 's/^SlurmdPort *= *\([0-9]*\).*/\1/p')
  while read -r node address; do
    { timeout 4 bash -c "true </dev/tcp/$address/$port" 2>/dev/null || log "NODE $node does not answer"; } &
    asked+=($!)
  done < <(scontrol --oneliner show node "$SLURM_JOB_NODELIST" |
    sed -n 's/^NodeName=\([^ ]*\) .*NodeAddr=\([^ ]*\) .*/\1 \2/p')
  wait "${asked[@]}"
}

# end_or_requeue: ends the job with CODE, or requeues it, which also ends this script. Codes 0 and 2 (invalid flags or
# checkpoint) and jobs that are being cancelled are not requeued.
end_or_requeue() {
  if ((CODE == 0)) || [ -n "$STOPPING" ]; then exit "$CODE"; fi
  log "FAILED with exit code $CODE on $SLURM_JOB_NODELIST"
  if ((CODE == 2)); then exit 2; fi
  name_lost_nodes
  local restarts=${SLURM_RESTART_COUNT:-0}
  if scontrol show job "$SLURM_JOB_ID" | grep -q 'Requeue=1' && ((restarts < MAX_RESTARTS)); then
    log "back to the queue, restart $((restarts + 1)) of $MAX_RESTARTS"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
  fi
  exit "$CODE"
}
