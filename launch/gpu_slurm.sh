#!/bin/sh
# Trains on GPU nodes of a Slurm cluster: one process per node, with all its GPUs.
set -eu
dry_run='' module=seeupo_jax.train nodes=1 gpus_per_node=8 cpus_per_node='' time='' partition=''
account='' job_name=seeupo_jax logs=runs/slurm grace=120 job='' after=''
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"

usage() {
    cat <<END
usage: launch/gpu_slurm.sh COMMAND [OPTION...]
           [--config=FILE.py --workdir=DIR [--config.FIELD=VALUE ...]]

  submit   submit the job, and print its number and the path of its log
  logs     follow the log of --job
  stop     let --job save and requeue it
  cancel   end --job permanently; its checkpoints remain

With --role=rollout after --config, every node is a rollout worker of the run in DIR: a task of a job
array, which ends and is requeued without the others.

The checkout, with its .venv, and DIR must be on a disk that all nodes see. Before its time limit,
and when it is preempted, the job saves, is requeued and later resumes.

  --nodes N             number of nodes (default: $nodes)
  --gpus-per-node N     (default: $gpus_per_node)
  --cpus-per-node N     (default: 8 per GPU)
  --time T              time limit, such as 12:00:00 (default: Slurm's)
  --partition P, --account A   (default: Slurm's)
  --after NUMBER        not before this job has begun, as for workers the trainer's
  --job-name NAME       (default: $job_name)
  --logs DIR            folder of the logs (default: $logs)
  --grace S             seconds for saving before the time limit (default: $grace)
  --job NUMBER          for logs, stop and cancel; of a worker NUMBER_TASK
  --module NAME         module to run (default: $module)
  --dry-run             print the commands without running them

Other options of sbatch can be set by its environment variables, such as SBATCH_QOS.
END
}

case ${1-} in
    -h | --help)
        usage
        exit 0
        ;;
    submit | logs | stop | cancel) command=$1 ;;
    *) fail "got '${1-}'; allowed: submit, logs, stop, cancel." ;;
esac
shift
parse "--dry-run" "--nodes --gpus-per-node --cpus-per-node --time --partition --account \
--job-name --logs --grace --job --after --module" "$@"
shift "$parsed"
whole_number --nodes "$nodes"
whole_number --gpus-per-node "$gpus_per_node"
whole_number --grace "$grace"
[ -n "$cpus_per_node" ] || cpus_per_node=$((8 * gpus_per_node))
whole_number --cpus-per-node "$cpus_per_node"
case $job_name in
    *[!A-Za-z0-9._-]*) fail "--job-name: got '$job_name'; allowed: letters, digits and '._-'." ;;
esac
case $command in
    submit)
        check_module_arguments "$@"
        check_config_file
        check_listening
        [ -z "$after" ] || whole_number --after "$after"
        ;;
    *)
        whole_number --job "${job%%_*}"
        [ "${job#*_}" = "$job" ] || whole_number "--job, of $job the task" "${job#*_}"
        ;;
esac
local_python
cd "$root"

submit() {
    run mkdir -p "$logs"
    set -- launch/slurm_job.sh "$logs/$job_name" ${role:+--alone} "$python" -m "$module" "$@"
    array='' log=$logs/%x-%j.log workers=''
    [ -z "$role" ] || {
        array=1-$nodes nodes=1 log=$logs/%x-%A_%a.log workers=_TASK
    }
    [ -n "$dry_run" ] || say "submitting to Slurm"
    number=$(run sbatch --parsable "--job-name=$job_name" "--nodes=$nodes" --ntasks-per-node=1 \
        "--gpus-per-node=$gpus_per_node" "--cpus-per-task=$cpus_per_node" --requeue \
        "--signal=B:TERM@$grace" --open-mode=append "--output=$log" "--chdir=$root" \
        ${array:+"--array=$array"} ${after:+"--dependency=after:$after"} \
        ${time:+"--time=$time"} ${partition:+"--partition=$partition"} \
        ${account:+"--account=$account"} "$@") || {
        say "error: Slurm rejected the job; see the output above."
        exit 1
    }
    if [ -n "$dry_run" ]; then
        printf '%s\n' "$number"
    else
        echo "job ${number%%;*}; log: $logs/$job_name-${number%%;*}$workers.log"
    fi
}

case $command in
    submit)
        need sbatch "$python"
        submit "$@"
        ;;
    logs) run tail -n +1 -F "$logs/$job_name-$job.log" ;;
    stop)
        need scancel
        run scancel --batch --signal=TERM "$job"
        ;;
    cancel)
        need scancel
        run scancel "$job"
        ;;
esac
