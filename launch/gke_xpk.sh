#!/bin/sh
# Trains on TPU slices of a GKE cluster: xpk creates one JobSet, which is restarted if it fails.
set -eu
dry_run='' module=seeupo_jax.train cluster='' zone='' project='' workload='' tpu_type=''
slices=1 image='' max_restarts=50 grace=300 priority=medium
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"

usage() {
    cat <<END
usage: launch/gke_xpk.sh COMMAND --cluster=CLUSTER --workload=NAME [OPTION...]
           [--config=FILE.py --workdir=DIR [--config.FIELD=VALUE ...]]

DIR must be in a bucket that 'xpk storage attach' mounts as /mnt/BUCKET, or the checkpoints must
be in a bucket: --config.checkpoint.directory=gs://BUCKET/DIR.

  run      submit the workload, and show its state in the queue
  logs     follow the first host's log
  wait     wait until the workload has ended; exit code 0 means success
  delete   end the workload and remove it

  --cluster CLUSTER     created by 'xpk cluster create'
  --workload NAME       name of the workload
  --zone ZONE, --project PROJECT   of the cluster (default: gcloud's)
  --tpu-type TYPE       type of one slice, such as v5p-64
  --slices N            number of slices that train together (default: $slices)
  --image IMAGE         image built from the Dockerfile, in a registry that the cluster reads
  --max-restarts N      after preemptions and lost hosts (default: $max_restarts)
  --grace S             seconds for saving after SIGTERM (default: $grace)
  --priority LEVEL      very-low, low, medium, high, very-high (default: $priority)
  --module NAME         module to run (default: $module)
  --dry-run             print the commands without running them
END
}

choose_command "run logs wait delete" "${1-}"
shift
parse "--dry-run" "--cluster --workload --zone --project --tpu-type --slices --image \
--max-restarts --grace --priority --module" "$@"
shift "$parsed"

required --cluster "$cluster" my-cluster
required --workload "$workload" my-run
cloud_name --workload "$workload"
whole_number --slices "$slices"
whole_number --max-restarts "$max_restarts"
whole_number --grace "$grace"
case $priority in
    very-low | low | medium | high | very-high) ;;
    *) fail "--priority: got '$priority'; allowed: very-low, low, medium, high, very-high." ;;
esac

# place COMMAND...: adds the cluster, and its zone and project if given.
place() {
    run "$@" "--cluster=$cluster" ${zone:+"--zone=$zone"} ${project:+"--project=$project"}
}

# A lost host ends the others with exit code 1; a user's mistake ends all with 2. So xpk restarts on
# 1 as on signals (143: on_host.sh's code of a run that was stopped and has saved). `exec` makes
# xpk's SIGTERM reach on_host.sh instead of a shell around it.
submit() {
    place xpk workload create "--workload=$workload" "--tpu-type=$tpu_type" \
        "--num-slices=$slices" "--docker-image=$image" "--priority=$priority" \
        "--max-restarts=$max_restarts" --restart-on-exit-codes=1 \
        "--termination-grace-period-seconds=$grace" \
        "--command=exec launch/on_host.sh run $(quote python -m "$module" "$@")" || {
        code=$?
        say "error: xpk rejected the workload; see the output above."
        exit "$code"
    }
    place xpk workload list "--filter-by-job=$workload"
}

logs() {
    run gcloud container clusters get-credentials "$cluster" "--location=${zone%-[a-z]}" \
        ${project:+"--project=$project"}
    first=batch.kubernetes.io/job-completion-index=0,jobset.sigs.k8s.io/job-index=0
    run kubectl logs --follow --tail=-1 --container=jax-tpu \
        "--selector=jobset.sigs.k8s.io/jobset-name=$workload,$first"
}

case $command in
    run)
        required --tpu-type "$tpu_type" v5p-64
        required --image "$image" us-docker.pkg.dev/my-project/images/seeupo_jax
        check_module_arguments "$@"
        check_listening
        [ -z "$role" ] || fail "--role: got rollout; allowed: none, since jobset.sh and gcluster.sh \
start rollout workers."
        check_kept
        need xpk
        submit "$@"
        ;;
    logs)
        required --zone "$zone" us-east5-a
        need gcloud kubectl
        logs
        ;;
    wait)
        need xpk
        place xpk workload list "--wait-for-job-completion=$workload"
        ;;
    delete)
        need xpk
        place xpk workload delete "--workload=$workload" --force
        ;;
esac
