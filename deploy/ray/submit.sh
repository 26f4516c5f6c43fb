#!/bin/bash
# Submit a run to a Ray cluster as a job: the driver runs on the cluster, and ends with it, not with this terminal.
#
#   RLHF_OUTPUT=/shared/runs/one deploy/ray/submit.sh run.toml [flags of rlhf train]
#
#   RAY_API_SERVER_ADDRESS   the cluster's job server (http://127.0.0.1:8265); reach another machine's through ssh -L
#   RLHF_OUTPUT              run directory: an absolute path that every node sees, as the job's own folder goes with it
#   RLHF_JOB                 name of the job; where absent, Ray makes one up
#   RLHF_WAIT                `no`: return once the job is submitted
#
# The current folder travels (`excludes` in runtime-env.yaml stay behind), so the run file's relative paths hold.
# Needs `pip install "ray[default]"` here and on the cluster.

set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: RLHF_OUTPUT=/shared/runs/NAME deploy/ray/submit.sh RUN.TOML [flags of rlhf train]" >&2
    exit 2
fi
case ${RLHF_OUTPUT:-} in
/*) ;;
*)
    echo "submit.sh: RLHF_OUTPUT must be an absolute path on a file system that every node sees, got '${RLHF_OUTPUT:-}'" >&2
    exit 2
    ;;
esac

words=(--address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" --working-dir "$PWD")
words+=(--runtime-env "$(dirname "${BASH_SOURCE[0]}")/runtime-env.yaml")
if [ -n "${RLHF_JOB:-}" ]; then words+=(--submission-id "$RLHF_JOB"); fi
if [ "${RLHF_WAIT:-yes}" = no ]; then words+=(--no-wait); fi

# Ray tells the job its cluster's address (RAY_ADDRESS), which is what `auto` finds.
exec ray job submit "${words[@]}" -- \
    rlhf train --backend ray --launcher.address auto --output "$RLHF_OUTPUT" "$@"
