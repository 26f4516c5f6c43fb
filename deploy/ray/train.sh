#!/bin/bash
# A run on a Ray cluster that may be taken away: starts the run in RLHF_OUTPUT, or continues the one that is there.
#
#   RLHF_OUTPUT=/shared/runs/one deploy/ray/train.sh run.toml [flags of rlhf train]
#
#   RLHF_OUTPUT   run directory: an absolute path on a file system that every node sees
#
# SIGTERM, or stop.sh on any node, lets the run finish its step, save and end (exit code 143).

set -euo pipefail

for word in "$@"; do
    case $word in
    --output | --output=* | --run.output* | --overwrite | --run.overwrite* | --launcher.address*)
        echo "train.sh: $word is not possible here: RLHF_OUTPUT is the run directory, and a run in it continues" >&2
        exit 2
        ;;
    esac
done
case ${RLHF_OUTPUT:-} in
/*) ;;
*)
    echo "train.sh: RLHF_OUTPUT must be an absolute path that every node sees, got '${RLHF_OUTPUT:-}'" >&2
    exit 2
    ;;
esac

# Exists while the run works, and is touched all the time. stop.sh writes into it.
mark=$RLHF_OUTPUT.running-${RAY_CLUSTER_NAME:-$HOSTNAME}
mkdir -p "$(dirname "$mark")"
: >"$mark"
trap 'rm -f "$mark"' EXIT
stop= # once a signal came
trap 'stop=yes' TERM

resume=()
if [ -e "$RLHF_OUTPUT/config.toml" ]; then resume=(--resume); fi
rlhf train --backend ray --launcher.address auto --output "$RLHF_OUTPUT" "${resume[@]}" "$@" &
run=$!
told=
while kill -0 "$run" 2>/dev/null; do
    touch "$mark"
    if [ -z "$told" ] && { [ -n "$stop" ] || [ -s "$mark" ]; }; then
        told=yes
        echo "train.sh: SIGTERM for the run: it saves and stops after its step" >&2
        kill -TERM "$run" 2>/dev/null || true
    fi
    sleep 2 &
    wait $! || true # a signal ends the wait
done
status=0
wait "$run" || status=$?
exit "$status"
