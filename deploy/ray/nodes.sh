#!/bin/bash
# Ray over the machines of a job, for a scheduler that starts one command on each. Machine 0 is the head and executes
# COMMAND once all have joined; Ray ends with COMMAND, whose exit code this is. The others serve until the head ends.
#
#   deploy/ray/nodes.sh RANK COUNT HEAD_IP COMMAND [ARGUMENTS]
#
#   RLHF_PORT        port of the Ray head (6379)
#   RLHF_START       seconds for all machines to join (300)
#   RAY_AUTH_TOKEN   a secret that all machines have; without it whoever reaches the port can run code

set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: nodes.sh RANK COUNT HEAD_IP COMMAND [ARGUMENTS]" >&2
    exit 2
fi
rank=$1 count=$2 head=$3
shift 3
if [ -z "${RAY_AUTH_TOKEN:-}" ]; then
    echo "nodes.sh: RAY_AUTH_TOKEN is not set; make one for the job: openssl rand -hex 32" >&2
    exit 2
fi
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# As in a Ray that the launcher starts itself: it says which GPUs a worker sees, and an engine's children end with it.
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper=true
export RAY_ADDRESS=$head:${RLHF_PORT:-6379} # what `--launcher.address auto` finds
deadline=$((SECONDS + ${RLHF_START:-300}))
late() { # MESSAGE
    [ $SECONDS -ge $deadline ] || return 1
    echo "nodes.sh: not $count Ray nodes within ${RLHF_START:-300} s (RLHF_START gives more time): $1" >&2
}
# Another Ray of the machine, such as SkyPilot's own, has the usual port of the agent.
start=(ray start --block --dashboard-agent-listen-port=52366)

if [ "$rank" -ne 0 ]; then
    until answer=$(ray health-check --address "$RAY_ADDRESS" 2>&1); do
        if late "$answer"; then exit 1; fi
        sleep 1
    done
    "${start[@]}" --address="$RAY_ADDRESS" || true # the head has gone, which is how the job ends
    exit 0
fi

stop= # once a signal came
trap 'stop=yes' TERM
"${start[@]}" --head --node-ip-address="$head" --port="${RLHF_PORT:-6379}" --include-dashboard=false &
ray=$!
finish() { kill -TERM "$ray" 2>/dev/null && wait "$ray"; }
trap 'finish || true' EXIT

joined() {
    python -c '
import sys, ray
ray.init(logging_level="ERROR", log_to_driver=False)
alive = sum(node["Alive"] for node in ray.nodes())
sys.exit(f"{alive} have joined" if alive < int(sys.argv[1]) else 0)
' "$count" 2>&1
}
until answer=$(joined); do
    if [ -n "$stop" ]; then exit 143; fi
    if late "$answer"; then exit 1; fi
    kill -0 "$ray" # whose output is above
    sleep 1
done

"$@" &
command=$!
trap 'kill -TERM "$command" 2>/dev/null || true' TERM
if [ -n "$stop" ]; then kill -TERM "$command"; fi
while true; do
    status=0
    wait "$command" || status=$?
    kill -0 "$command" 2>/dev/null || exit "$status"
done
