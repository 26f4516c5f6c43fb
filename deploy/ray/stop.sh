#!/bin/bash
# Ask the run of train.sh to save and end, from any node, and wait until it has. For what a scheduler calls before it
# takes a node away, such as the preStop hook of a pod. RLHF_OUTPUT and RAY_CLUSTER_NAME are those of train.sh.

set -euo pipefail

mark=$RLHF_OUTPUT.running-${RAY_CLUSTER_NAME:-$HOSTNAME}
[ -e "$mark" ] || exit 0
echo stop >"$mark"
# Without a touch in 3 minutes train.sh was killed, and nobody removes its file.
while [ -n "$(find "$mark" -mmin -3 2>/dev/null)" ]; do sleep 2; done
