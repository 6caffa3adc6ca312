#!/bin/sh
# The batch script of gpu_slurm.sh: slurm_job.sh CODES COMMAND...
# Runs the command on every node, and puts the job back into the queue when it was only stopped.
# CODES.JOB.0, CODES.JOB.1, ...: the nodes' exit codes; 143: saved and ended after SIGTERM.
set -eu
codes=$1.$SLURM_JOB_ID
shift
rm -f "$codes".*

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # One process has all GPUs of its node; JAX's own reading of Slurm gives each process one.
    set -- "$@" "--coordinator=$first:$((61440 + SLURM_JOB_ID % 4096))" \
        "--num_processes=$SLURM_JOB_NUM_NODES"
    number=" --process_id=\"\$SLURM_PROCID\""
fi
[ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# Slurm signals only this script before the time limit; it forwards the signal to the step.
stopped='' step=''
trap 'stopped=${stopped}1; test -z "$step" || scancel --signal=TERM "$SLURM_JOB_ID"' TERM
srun --kill-on-bad-exit=1 sh -c \
    "exec launch/on_host.sh run --code \"\$0.\$SLURM_PROCID\" \"\$@\"${number-}" "$codes" "$@" &
step=$!
[ -z "$stopped" ] || kill -TERM "$step"
waited=never
# A signal ends the wait, whether the step has ended or not.
until [ "$waited" = "$stopped" ]; do
    waited=$stopped code=0
    wait "$step" || code=$?
done
trap '' TERM

if [ -n "$stopped" ] || grep -qsx 143 "$codes".*; then
    # A cancelled job is no longer RUNNING, and is not requeued.
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        echo "slurm_job: stopped before its end; job $SLURM_JOB_ID is requeued"
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
