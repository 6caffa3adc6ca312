#!/bin/sh
# The batch script of gpu_slurm.sh: slurm_job.sh CODES [--alone] COMMAND...
# Runs the command on every node, and requeues the job if it was stopped before its end.
# CODES.JOB.0, CODES.JOB.1, ... are files with the nodes' exit codes; 143: saved after SIGTERM.
# --alone: of on_host.sh.
set -eu
job=$SLURM_JOB_ID
# One task of an array has the array's number, by which Slurm would take all tasks.
[ -z "${SLURM_ARRAY_TASK_ID-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
codes=$1.$job
shift
rm -f "$codes".*

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # One process has all GPUs of its node; JAX's own Slurm detection would give each process one.
    set -- "$@" "--coordinator=$first:$((61440 + SLURM_JOB_ID % 4096))" \
        "--num_processes=$SLURM_JOB_NUM_NODES"
    number=" --process_id=\"\$SLURM_PROCID\""
fi
[ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# Slurm signals only this script before the time limit, so it forwards the signal to the step.
stopped='' step=''
trap 'stopped=${stopped}1; test -z "$step" || scancel --signal=TERM "$job"' TERM
srun --kill-on-bad-exit=1 sh -c \
    "exec launch/on_host.sh run --code \"\$0.\$SLURM_PROCID\" \"\$@\"${number-}" "$codes" "$@" &
step=$!
[ -z "$stopped" ] || kill -TERM "$step"
waited=never
# A signal interrupts `wait` even if the step has not ended.
until [ "$waited" = "$stopped" ]; do
    waited=$stopped code=0
    wait "$step" || code=$?
done
trap '' TERM

if [ -n "$stopped" ] || grep -qsx 143 "$codes".*; then
    # A cancelled job is no longer RUNNING, and is not requeued.
    if [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; then
        echo "slurm_job: stopped before its end; job $job is requeued"
        scontrol requeue "$job"
    fi
fi
exit "$code"
