#!/bin/sh
# Trains on TPU slices of a GKE cluster as one JobSet, written here and applied by kubectl.
set -eu
dry_run='' module=seeupo_jax.train name='' topology='' chips_per_host='' slices=1 image=''
bucket='' service_account='' queue='' spot='' max_restarts=50 grace=300 namespace='' context=''
poll=30 workers='' worker_topology='' worker_spot='' worker_flags='' worker=''
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"

usage() {
    cat <<END
usage: launch/jobset.sh COMMAND --name=NAME [OPTION...]
           [--config=FILE.py --workdir=DIR [--config.FIELD=VALUE ...]]

DIR must be in --bucket, as /mnt/BUCKET/..., or the checkpoints must be in a bucket:
--config.checkpoint.directory=gs://BUCKET/DIR.

  run      apply the JobSet; with --dry-run, print it for 'kubectl apply --filename=FILE'
  logs     follow the log of the trainer's first host, or of a rollout worker (--worker)
  wait     wait until the JobSet has ended; exit code 0 means success
  delete   end the JobSet and remove it; training saves

  --name NAME             name of the JobSet
  --topology CHIP:SHAPE   one slice, such as v5p:4x4x4, of a node pool of its own
  --chips-per-host N      chips of one node (default: 4, or all of a smaller slice)
  --slices N              number of slices that train together (default: $slices)
  --image IMAGE           image built from the Dockerfile, in a registry that the cluster reads
  --bucket BUCKET         Cloud Storage bucket to mount as /mnt/BUCKET
  --service-account NAME  of Kubernetes, which may use the bucket (default: the namespace's)
  --queue NAME            Kueue's LocalQueue (default: none, started at once)
  --spot                  use node pools of spot machines
  --workers N             also start N rollout workers, each with restarts of its own
  --worker-topology CHIP:SHAPE   one worker, of one host, such as v6e:2x4
  --worker-spot           workers use node pools of spot machines
  --worker-flags='FLAG ...'   more flags of their commands, such as --config.mesh.tensor=8
  --worker NUMBER         for logs: of this worker, from 0
  --max-restarts N        after preemptions and lost hosts (default: $max_restarts)
  --grace S               seconds for saving after SIGTERM (default: $grace)
  --namespace N, --context C   (default: kubectl's)
  --poll S                seconds between checks of 'wait' (default: $poll)
  --module NAME           module to run (default: $module)
  --dry-run               print the JobSet or the commands without running them
END
}

choose_command "run logs wait delete" "${1-}"
shift
parse "--dry-run --spot --worker-spot" "--name --topology --chips-per-host --slices --image --bucket \
--service-account --queue --max-restarts --grace --namespace --context --poll --module --workers \
--worker-topology --worker-flags --worker" "$@"
shift "$parsed"

required --name "$name" my-run
cloud_name --name "$name"
whole_number --slices "$slices"
whole_number --max-restarts "$max_restarts"
whole_number --grace "$grace"
whole_number --poll "$poll"
bucket_name "$bucket"
# plain NAME VALUE: checks what is written into the manifest without quotes.
plain() {
    case $2 in
        *[!A-Za-z0-9._/:@-]* | [!A-Za-z0-9]*)
            fail "$1: got '$2'; allowed: letters, digits and '._/:@-'."
            ;;
    esac
}
plain --image "${image:-none}"
plain --service-account "${service_account:-none}"
plain --queue "${queue:-none}"
case $worker in
    *[!0-9]*) fail "--worker: got '$worker'; allowed: a number from 0." ;;
esac

# check_topology OPTION TOPOLOGY: sets `accelerator` (a node's label), `shape`, `sides` and `chips`.
check_topology() {
    shape=${2#*:} sides=3
    case $2 in
        v4:*) accelerator=tpu-v4-podslice ;;
        v5e:*) accelerator=tpu-v5-lite-podslice sides=2 ;;
        v5p:*) accelerator=tpu-v5p-slice ;;
        v6e:*) accelerator=tpu-v6e-slice sides=2 ;;
        tpu7x:*) accelerator=tpu7x ;;
        *) fail "$1: got '$2'; allowed: v4, v5e, v5p, v6e or tpu7x, and a shape, as in v5p:4x4x4." ;;
    esac
    chips=1 number=0
    for side in $(printf '%s' "$shape" | tr x ' '); do
        whole_number "$1, of $2 a side" "$side"
        chips=$((chips * side)) number=$((number + 1))
    done
    [ "$number" -eq "$sides" ] && [ "${shape%x}" = "$shape" ] ||
        fail "$1: got '$2'; allowed: $sides sides, as in 4x4${sides#2}."
}

# check_slices: of the trainer; sets also `hosts` and `node_chips`.
check_slices() {
    required --topology "$topology" v5p:4x4x4
    check_topology --topology "$topology"
    node_chips=${chips_per_host:-$((chips < 4 ? chips : 4))}
    whole_number --chips-per-host "$node_chips"
    hosts=$((chips / node_chips))
    [ $((hosts * node_chips)) -eq "$chips" ] ||
        fail "--chips-per-host: got $node_chips; allowed: a divisor of the $chips chips of $topology."
    [ "$slices" -eq 1 ] || [ "$hosts" -gt 1 ] ||
        fail "--slices: got $slices of one host each; allowed: 1, or slices of several hosts, \
which alone GKE joins."
}

# check_workers: as check_slices, of a rollout worker.
check_workers() {
    required --worker-topology "$worker_topology" v6e:2x4
    check_topology --worker-topology "$worker_topology"
    hosts=1 node_chips=$chips
    [ "$chips" -le $((sides == 2 ? 8 : 4)) ] ||
        fail "--worker-topology: got '$worker_topology' of several hosts; allowed: one host, such as \
v6e:2x4 or v5p:2x2x1, since every host is a worker of its own."
}

# check_options: what depends on several options, and on the module's arguments.
check_options() {
    check_kept
    check_mounted
    check_listening
    [ -z "$role" ] || fail "--role: got rollout; allowed: none, but --workers=N before --config, \
which adds workers to the trainer's JobSet."
    if [ -z "$workers" ]; then
        [ -z "$worker_topology$worker_spot$worker_flags" ] ||
            fail "--workers: got nothing with options of workers; allowed: their number."
        return 0
    fi
    whole_number --workers "$workers"
    check_workers
    [ -n "$port_set" ] || fail "--config.rollout.port: got nothing with --workers; allowed: the port \
where the trainer listens for them, such as 8790."
    case $workdir in
        /mnt/?*) ;;
        *) fail "--workdir: got '$workdir' with --workers; allowed: a folder that they share, in \
--bucket: /mnt/BUCKET/DIR." ;;
    esac
}

# scalar WORD: prints a YAML string in double quotes.
scalar() {
    printf '"%s"' "$(printf '%s' "$1" | sed 's/[\\"]/\\&/g')"
}

# manifest COMMAND...: prints the JobSet whose pods run the command.
#
# network: JobSet makes a headless service, by which the hosts find each other; GKE sets
# TPU_WORKER_HOSTNAMES, TPU_WORKER_ID and MEGASCALE_* from it. A lost host ends the others with exit
# code 1 or a signal, and a run that was stopped has 143 (on_host.sh): all slices begin again, once no
# pod of before is left. A user's mistake is exit code 2: it ends the JobSet at once.
manifest() {
    left_out='' # lines of options that are not given
    leave_out --queue "$queue"
    leave_out --workers "$workers"
    # In quotes: words such as on and no, which YAML takes for something else.
    sed "$left_out" <<END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: "$name"
  labels: # --queue
    kueue.x-k8s.io/queue-name: "$queue" # --queue
spec:
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  successPolicy: # --workers
    operator: All # --workers
    targetReplicatedJobs: [slice] # --workers
  failurePolicy:
    maxRestarts: $max_restarts
    restartStrategy: BlockingRecreate
    rules:
      - name: mistake
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
END
    check_slices
    replicated_job slice "$slices" "$spot" "$@"
    [ -n "$workers" ] || return 0
    check_workers
    set -f # a word of the flags is no pattern of files
    # Slices may wait for nodes for hours. A worker that gives them up ends the JobSet.
    # shellcheck disable=SC2086  # one word for each flag
    replicated_job worker "$workers" "$worker_spot" --alone "$@" --patience=86400 $worker_flags \
        --role=rollout
}

# replicated_job NAME REPLICAS SPOT COMMAND...: prints the Jobs of the slices, or of the workers.
#
# exclusive-topology: a slice is one node pool. A worker's pod is replaced by its Job when it is lost,
# without the JobSet: where it was preempted (DisruptionTarget) or stopped (143) as often as it comes
# to that, else --max-restarts times.
replicated_job() {
    job=$1 replicas=$2 job_spot=$3
    shift 3
    backoff=0 of_trainer=1 of_workers=''
    [ "$job" = slice ] || backoff=$max_restarts of_trainer='' of_workers=1
    left_out=''
    leave_out --trainer "$of_trainer"
    leave_out --workers "$of_workers"
    leave_out --bucket "$bucket"
    leave_out --service-account "$service_account"
    leave_out --spot "$job_spot"
    sed "$left_out" <<END
    - name: $job
      replicas: $replicas
      template:
        metadata: # --trainer
          annotations: # --trainer
            alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool # --trainer
        spec:
          completionMode: Indexed
          parallelism: $hosts
          completions: $hosts
          backoffLimit: $backoff
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes: {containerName: train, operator: In, values: [2]}
              - action: Ignore # --workers
                onExitCodes: {containerName: train, operator: In, values: [143]} # --workers
              - action: Ignore # --workers
                onPodConditions: [{type: DisruptionTarget, status: "True"}] # --workers
          template:
            metadata: # --bucket
              annotations: # --bucket
                gke-gcsfuse/volumes: "true" # --bucket
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: $grace
              hostNetwork: true
              dnsPolicy: ClusterFirstWithHostNet
              serviceAccountName: "$service_account" # --service-account
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: $accelerator
                cloud.google.com/gke-tpu-topology: $shape
                cloud.google.com/gke-spot: "true" # --spot
              tolerations:
                - {key: google.com/tpu, operator: Exists, effect: NoSchedule}
                - {key: cloud.google.com/gke-spot, operator: Exists, effect: NoSchedule} # --spot
              volumes: # --bucket
                - name: bucket # --bucket
                  csi: # --bucket
                    driver: gcsfuse.csi.storage.gke.io # --bucket
                    volumeAttributes: # --bucket
                      bucketName: "$bucket" # --bucket
                      hostNetworkPodKSA: "true" # --bucket
                      mountOptions: $bucket_options # --bucket
              containers:
                - name: train
                  image: "$image"
                  securityContext:
                    privileged: true
                  resources:
                    requests: {google.com/tpu: $node_chips}
                    limits: {google.com/tpu: $node_chips}
                  volumeMounts: # --bucket
                    - {name: bucket, mountPath: /mnt/$bucket} # --bucket
                  command:
                    - launch/on_host.sh
                    - run
END
    for word in "$@"; do
        printf '                    - %s\n' "$(scalar "$word")"
    done
}

# leave_out OPTION VALUE: leaves out the lines that end in this option where its value is empty.
leave_out() {
    [ -n "$2" ] || left_out="$left_out
/# $1\$/d"
}

# cluster ARGUMENT...: runs kubectl in the namespace and context.
cluster() {
    run kubectl ${context:+"--context=$context"} ${namespace:+"--namespace=$namespace"} "$@"
}

submit() {
    [ -z "$dry_run" ] || {
        manifest "$@"
        return 0
    }
    manifest "$@" | cluster apply --filename=- || {
        say "error: the cluster rejected the JobSet; see the output above."
        exit 1
    }
}

# wait_until_ended: returns 0 if the JobSet completed. An answer that does not come is asked for
# again; a JobSet that is not there ends the wait.
wait_until_ended() {
    while :; do
        ended=$(cluster get "jobset/$name" '--output=jsonpath={.status.terminalState}' 2>&1) ||
            case $ended in
                *NotFound*) fail "--name: got '$name'; allowed: a JobSet that is there." ;;
                *) say "$ended" ;;
            esac
        case $ended in
            Completed) return 0 ;;
            Failed)
                say "error: the JobSet failed; '$0 logs' and 'kubectl describe jobset $name' show why."
                return 1
                ;;
        esac
        sleep "$poll"
    done
}

case $command in
    run)
        check_slices
        required --image "$image" us-docker.pkg.dev/my-project/images/seeupo_jax
        check_module_arguments "$@"
        check_options
        need kubectl
        submit python -m "$module" "$@"
        ;;
    logs)
        need kubectl
        job=slice
        [ -z "$worker" ] || job=worker
        key=jobset.sigs.k8s.io
        first=batch.kubernetes.io/job-completion-index=0,$key/job-index=${worker:-0}
        cluster logs --follow --tail=-1 --container=train \
            "--selector=$key/jobset-name=$name,$key/replicatedjob-name=$job,$first"
        ;;
    wait)
        need kubectl
        if [ -n "$dry_run" ]; then
            cluster get "jobset/$name" '--output=jsonpath={.status.terminalState}'
        else
            wait_until_ended
        fi
        ;;
    delete)
        need kubectl
        cluster delete "jobset/$name"
        ;;
esac
