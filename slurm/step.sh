# One step over all nodes of the job and how it ended, for the scripts of this folder.
# shellcheck shell=bash

: "${MAX_RESTARTS:=3}"
: "${STEP_GRACE:=10}"   # seconds for the rest of the step to end after node 0's part
STOPPING=''

# scancel sends SIGTERM to the program on all nodes and to this script, which has only to wait for it.
trap 'STOPPING=1' TERM

say() { echo "[$(date '+%F %T') $SLURMD_NODENAME] $*"; }

# start_step COMMAND...: one task a node, in the background.
start_step() {
  # The secret of the sockets between this job's nodes. It travels in the environment of the tasks, which neither
  # `scontrol show job` nor `ps` shows to other users.
  : "${MOE_ENGINE_DIST_SECRET:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
  export MOE_ENGINE_DIST_SECRET
  NODE0_CODE=$(mktemp)   # this script runs on node 0, too
  export NODE0_CODE
  # The shell around the command keeps SIGTERM from ending the task before the program has drained, and lets a program
  # that SIGTERM has killed, because another node failed, not hide that node's exit code. No binding: the program's ranks
  # share out the node's cores among themselves.
  # shellcheck disable=SC2016
  srun --export=ALL --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit="${KILL_ON_BAD_EXIT:-1}" --wait=0 bash -c '
    trap "told=1" TERM
    "$@"
    code=$?
    if [ "$code" = 143 ] && [ -n "$told" ]; then code=0; fi
    [ "$SLURM_NODEID" != 0 ] || echo "$code" >"$NODE0_CODE"
    exit "$code"' step "$@" &
  STEP=$!
}

# step_runs: whether node 0's part of the step still runs.
step_runs() { kill -0 "$STEP" 2>/dev/null && [ ! -s "$NODE0_CODE" ]; }

# wait_step: until the step has ended; its exit code is in CODE. srun waits for a dead node until SLURM has noticed,
# which takes SlurmdTimeout (300 s by default); the program knows within seconds, so node 0's own end is enough.
wait_step() {
  local late=0
  while kill -0 "$STEP" 2>/dev/null; do
    if [ -s "$NODE0_CODE" ] && ((late++ > STEP_GRACE)); then
      say "srun still waits for other nodes: going on without them"
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

# name_lost_nodes: says which nodes of the job do not answer. SLURM's own daemon on them is asked, because a new step may
# have to wait for what is left of the last one.
name_lost_nodes() {
  local node address port asked=()
  port=$(scontrol show config | sed -n 's/^SlurmdPort *= *\([0-9]*\).*/\1/p')
  while read -r node address; do
    { timeout 4 bash -c "true </dev/tcp/$address/$port" 2>/dev/null || say "NODE $node does not answer"; } &
    asked+=($!)
  done < <(scontrol --oneliner show node "$SLURM_JOB_NODELIST" |
    sed -n 's/^NodeName=\([^ ]*\) .*NodeAddr=\([^ ]*\) .*/\1 \2/p')
  wait "${asked[@]}"
}

# end_or_requeue: ends the job with CODE, or sends it back to the queue, which ends this script, too. Codes 0 and 2
# (flags or checkpoint at fault) and a job that is being stopped stay as they are.
end_or_requeue() {
  if ((CODE == 0)) || [ -n "$STOPPING" ]; then exit "$CODE"; fi
  say "FAILED with exit code $CODE on $SLURM_JOB_NODELIST"
  if ((CODE == 2)); then exit 2; fi
  name_lost_nodes
  local restarts=${SLURM_RESTART_COUNT:-0}
  if scontrol show job "$SLURM_JOB_ID" | grep -q 'Requeue=1' && ((restarts < MAX_RESTARTS)); then
    say "back to the queue, restart $((restarts + 1)) of $MAX_RESTARTS"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
  fi
  exit "$CODE"
}
