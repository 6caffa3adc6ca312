#!/bin/sh
# Trains on TPU slices of a GKE cluster by the Cluster Toolkit, whose gcluster writes the JobSet.
set -eu
dry_run='' module=seeupo_jax.train cluster='' location='' project='' name='' compute_type=''
slices=1 image='' mount='' service_account='' queue='' priority='' restarts=50 grace=300
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"

usage() {
    cat <<END
usage: launch/gcluster.sh COMMAND --name=NAME [OPTION...]
           [--config=FILE.py --workdir=DIR [--config.FIELD=VALUE ...]]

DIR must be in a bucket that --mount mounts as /mnt/BUCKET, or the checkpoints must be in a
bucket: --config.checkpoint.directory=gs://BUCKET/DIR.

With --role=rollout after --config, the job is a rollout worker of the run in DIR: one host, such as
v6e-8. Every worker is a job with a name and restarts of its own.

  run      submit the job
  logs     follow its log
  status   list the job with its state
  delete   end the job and remove it

  --name NAME             name of the job, at most 28 characters
  --cluster C, --location L, --project P   (default: those of 'gcluster job config set')
  --compute-type TYPE     type of one slice, such as v5p-64
  --slices N              number of slices that train together (default: $slices)
  --image IMAGE           image built from the Dockerfile, in a registry that the cluster reads
  --mount VOLUME          passed on, in the syntax of your gcluster
  --service-account NAME  of Kubernetes, which may use the bucket
  --queue NAME            Kueue's LocalQueue (default: the cluster's)
  --priority CLASS        (default: the cluster's)
  --restarts N            after preemptions and lost hosts (default: $restarts)
  --grace S               seconds for saving after SIGTERM (default: $grace)
  --module NAME           module to run (default: $module)
  --dry-run               print the commands without running them
END
}

choose_command "run logs status delete" "${1-}"
shift
parse "--dry-run" "--name --cluster --location --project --compute-type --slices --image --mount \
--service-account --queue --priority --restarts --grace --module" "$@"
shift "$parsed"

required --name "$name" my-run
cloud_name --name "$name" 28 # gcluster's limit: Kueue and GKE add to it
whole_number --slices "$slices"
whole_number --restarts "$restarts"
whole_number --grace "$grace"

# job VERB ARGUMENT...: runs gcluster on the cluster.
job() {
    run gcluster job "$@" ${cluster:+"--cluster=$cluster"} ${location:+"--location=$location"} \
        ${project:+"--project=$project"}
}

# Without a list of exit codes gcluster starts any failed job again, a user's mistake too (2). Those
# listed are of lost hosts (1, and signals: abort, bus error, kill, segmentation fault) and of a run
# that was stopped and has saved (143, of on_host.sh). `exec` makes SIGTERM reach on_host.sh instead
# of a shell around it.
submit() {
    job submit "--name=$name" "--compute-type=$compute_type" "--num-slices=$slices" \
        "--image=$image" "--restarts=$restarts" --restart-on-exit-codes=1,134,135,137,139,143 \
        "--grace-period=${grace}s" ${mount:+"--mount=$mount"} \
        ${service_account:+"--service-account=$service_account"} ${queue:+"--queue=$queue"} \
        ${priority:+"--priority=$priority"} \
        "--command=exec launch/on_host.sh run ${role:+--alone }$(quote python -m "$module" "$@")" || {
        code=$?
        say "error: gcluster rejected the job; see the output above."
        exit "$code"
    }
}

case $command in
    run)
        required --compute-type "$compute_type" v5p-64
        required --image "$image" us-docker.pkg.dev/my-project/images/seeupo_jax
        check_module_arguments "$@"
        check_listening
        check_worker --compute-type "$compute_type"
        check_kept
        need gcluster
        submit "$@"
        ;;
    logs)
        need gcluster
        job logs "$name" --follow
        ;;
    status)
        need gcluster
        job list "--name-contains=$name"
        ;;
    delete)
        need gcluster
        job cancel "$name"
        ;;
esac
