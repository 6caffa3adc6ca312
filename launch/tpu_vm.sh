#!/bin/sh
# Trains on Cloud TPU VMs requested as a queued resource, on one slice or several.
set -eu
dry_run='' module=seeupo_jax.train name='' zone='' project='' accelerator_type=''
runtime_version='' spot='' slices=1 bucket='' git='' ref=main setup='' keep_alive=''
max_restarts=50 wait_limit=21600 poll=30 delete_when_done='' reserved='' reservation=''
valid_until_duration='' valid_until_time='' service_account='' network='' subnetwork=''
internal_ips=''
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"
# shellcheck source=launch/queued_resource.sh
. "$(dirname "$0")/queued_resource.sh"

usage() {
    cat <<END
usage: launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE [OPTION...]
           [--config=FILE.py --workdir=DIR [--config.FIELD=VALUE ...]]

  all      create, install and run, as far as needed
  create   request the TPU and wait until it is active
  install  copy this checkout to every host and create its .venv there; mount the bucket
  run      start training on every host, and show the log of the first host until it ends
  logs     show that log (interrupting this does not end the run)
  status   print the TPU's state, and every host's exit code
  stop     let training save and end
  resume   after a preemption: delete, create, install, run; training resumes from its checkpoint
  delete   delete the TPU

With --role=rollout after --config, the TPU is a rollout worker of the run in DIR: one host, such as
v6e-8. Every worker has a name, a TPU and restarts of its own.

  --name NAME               name of the queued resource and its TPU
  --zone ZONE               zone, such as us-east5-a
  --project PROJECT         (default: gcloud's)
  --accelerator-type TYPE   such as v5p-64; for all, create, resume, and run with --keep-alive
  --runtime-version VERSION such as v2-alpha-tpuv5; for the same commands
  --spot                    cheaper, and may be preempted at any time
  --reserved                on reserved capacity, of any reservation of the project
  --reservation NAME        on this reservation: NAME, or projects/PROJECT/reservations/NAME of
                            another project (by gcloud alpha)
  --valid-until-duration D  no machine later than this, such as 6h; or by --valid-until-time TIME
  --service-account EMAIL   of the hosts (default: that of Compute Engine)
  --network N, --subnetwork N   (default: default)
  --internal-ips            no external addresses; ssh goes through an IAP tunnel. For every
                            command on this TPU
  --slices N                number of TPUs that train together (default: $slices)
  --bucket BUCKET           Cloud Storage bucket to mount as /mnt/BUCKET on every host
  --git URL, --ref REF      install this repository instead of this checkout (default: $ref)
  --setup COMMAND           run this on every host after the installation, in the top folder of
                            the checkout, such as 'sh third_party/bfcl/setup.sh .venv/bin/python'
  --keep-alive              resume automatically when the TPU is preempted or a host restarts
  --max-restarts N          at most this often (default: $max_restarts)
  --wait-limit S            seconds to wait in the queue (default: $wait_limit)
  --poll S                  seconds between checks (default: $poll)
  --delete-when-done        delete the TPU when training has ended, even after a failure
  --module NAME             module to run (default: $module)
  --dry-run                 print the commands without running them
END
}

choose_command "all create install run logs status stop resume delete" "${1-}"
shift
parse "--spot --keep-alive --delete-when-done --reserved --internal-ips --dry-run" "--name --zone \
--project --accelerator-type --runtime-version --reservation --valid-until-duration \
--valid-until-time --service-account --network --subnetwork --slices --bucket --git --ref \
--max-restarts --wait-limit --poll --setup --module" "$@"
shift "$parsed"

required --name "$name" my-tpu
cloud_name --name "$name"
required --zone "$zone" us-east5-a
whole_number --slices "$slices"
whole_number --max-restarts "$max_restarts"
whole_number --wait-limit "$wait_limit"
whole_number --poll "$poll"
bucket_name "$bucket"
# Two ways to ask for a machine, or two limits of one request.
only_one() {
    [ -z "$2" ] || [ -z "$4" ] || fail "$1: got it with $3; allowed: one of them."
}
only_one --spot "$spot" --reserved "$reserved"
only_one --spot "$spot" --reservation "$reservation"
only_one --reserved "$reserved" --reservation "$reservation"
only_one --valid-until-duration "$valid_until_duration" --valid-until-time "$valid_until_time"
# After a preemption, `run --keep-alive` does what `all` does.
needs=$command
[ "$command$keep_alive" != run1 ] || needs=all
case $needs in
    all | create | resume)
        required --accelerator-type "$accelerator_type" v5p-64
        required --runtime-version "$runtime_version" v2-alpha-tpuv5
        ;;
esac
case $command in
    all | run | resume)
        check_module_arguments "$@"
        case $config in
            /*) fail "--config: got '$config'; allowed: a path relative to the checkout." ;;
        esac
        [ -n "$git" ] || check_config_file
        check_listening
        check_worker --accelerator-type "$accelerator_type"
        # The machine may be lost, or this command may delete it.
        [ -z "$spot$keep_alive$delete_when_done" ] && [ "$command" != resume ] || check_kept
        [ "$needs" = run ] || check_mounted
        ;;
    *) [ $# -eq 0 ] || fail "$command: got '$1'; allowed: no arguments for the training." ;;
esac
need gcloud

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# packed: prints the names of this checkout's files that git does not ignore, each followed by NUL.
packed() {
    git ls-files -z --cached --others --exclude-standard | xargs -0 sh -c "$existing" sh
}
# shellcheck disable=SC2016  # the inner shell expands it
existing='for file; do [ ! -e "$file" ] || printf "%s\0" "$file"; done'

check_size() {
    need git tar
    [ -z "$dry_run" ] || return 0
    git -C "$root" rev-parse --is-inside-work-tree >/dev/null 2>&1 ||
        fail "$root: got no git repository to install from; allowed: a clone, or --git URL."
    (cd "$root" && packed | xargs -0 du -sk) | sort -rn >"$scratch/sizes"
    total=0 largest=''
    while read -r size file; do
        total=$((total + size)) largest=${largest:-$file}
    done <"$scratch/sizes"
    [ "$total" -le 500000 ] || fail "this checkout: got $((total / 1000)) MB, '$largest' its \
largest file; allowed: 500 MB. Keep models and data in the bucket, or name them in .gitignore."
}

case $needs in
    all | install | resume) [ -n "$git" ] || check_size ;;
esac

install_checkout() {
    here='seeupo_jax/launch/on_host.sh install '$(quote 'jax[tpu]' ${setup:+"$setup"})
    if [ -n "$git" ]; then
        on_all "test -d seeupo_jax || git clone --quiet $(quote "$git") seeupo_jax; cd seeupo_jax &&\
 git fetch --quiet origin $(quote "$ref") && git checkout --quiet --detach FETCH_HEAD && cd .. &&\
 $here" || return 1
    else
        archive=$scratch/seeupo_jax.tar.gz
        pack "$archive" || return 1
        tpu scp "$archive" "$name:seeupo_jax.tar.gz" --node=all --worker=all \
            ${internal_ips:+--tunnel-through-iap} || return 1
        # Files of another checkout are removed; runs, models and the results of set-ups stay.
        on_all "mkdir -p seeupo_jax && find seeupo_jax -mindepth 1 -maxdepth 1 ! -name .venv\
 ! -name runs ! -name models ! -name third_party -exec rm -rf {} + &&\
 tar -xzf seeupo_jax.tar.gz -C seeupo_jax && $here" || return 1
    fi
}

# pack FILE: writes an archive of this checkout as it is, without files that git ignores.
pack() {
    if [ -n "$dry_run" ]; then
        printf 'cd %s && %s | xargs -0 sh -c %s sh | tar --null -T - -czf %s\n' "$(quote "$root")" \
            'git ls-files -z --cached --others --exclude-standard' \
            "$(quote "$existing")" "$(quote "$1")"
        return 0
    fi
    (cd "$root" && packed | tar --null -T - -czf "$1")
}

# start ARGUMENT...: starts training; mounts the bucket first, since a restart unmounts it.
start() {
    mount=''
    [ -z "$bucket" ] || mount="launch/on_host.sh mount $bucket && "
    trains=$(quote .venv/bin/python -m "$module" "$@")
    on_all "cd seeupo_jax && ${mount}launch/on_host.sh start ${role:+--alone }$trains" || {
        say "error: training was not started on every host; see the output above."
        return 1
    }
}

# follow LINES: shows the first host's log until its run or the connection ends; sets `outcome`.
follow() {
    on_first "seeupo_jax/launch/on_host.sh follow $1" || true
    if [ -n "$dry_run" ]; then
        on_first 'seeupo_jax/launch/on_host.sh code'
        outcome=0
    else
        outcome=$(on_first 'seeupo_jax/launch/on_host.sh code' 2>/dev/null | tail -n 1)
    fi
}

# again ARGUMENT...: starts training again, on a new TPU after a preemption.
again() {
    while [ "$restarts" -lt "$max_restarts" ]; do
        restarts=$((restarts + 1))
        say "restart $restarts of $max_restarts"
        if give_back && request && wait_until_active && install_checkout &&
            start "$@"; then
            return 0
        fi
        sleep "$poll"
    done
    say "error: training was not started again within --max-restarts=$max_restarts."
    return 1
}

# supervise ARGUMENT...: shows the log until training ends, across lost connections and lost TPUs.
supervise() {
    restarts=0 lines=+1 looks=0
    while :; do
        follow "$lines"
        lines=0
        case $outcome in
            0)
                say "training has ended"
                return 0
                ;;
            running | '') looks=0 lines=20 ;; # the connection was lost
            143 | lost | none) ;;
            *) may_be_lost || failed || return "$outcome" ;;
        esac
        ask_state ACTIVE
        case $state in
            ACTIVE) look_again "$@" || return $? ;;
            UNKNOWN) sleep "$poll" ;;
            *)
                say "$name is $state: it was preempted"
                [ -n "$keep_alive" ] || {
                    say "'$0 resume' with the same arguments resumes from the last checkpoint"
                    return 1
                }
                again "$@" || return 1
                lines=+1 looks=0
                ;;
        esac
    done
}

# may_be_lost: whether the first host's run may have failed because another host was lost. That ends
# it with 1 or a signal; a user's mistake ends it with 2.
may_be_lost() {
    [ -n "$keep_alive" ] && { [ "$outcome" -eq 1 ] || [ "$outcome" -gt 128 ]; }
}

failed() {
    say "error: training failed with exit code $outcome; the last lines of every host:"
    on_all 'tail -n 20 seeupo_jax_run/log' || true
    return 1
}

# look_again ARGUMENT...: handles a TPU that is ACTIVE although the first host's run has ended or
# does not answer. The state may change within minutes.
look_again() {
    looks=$((looks + 1))
    sleep "$poll"
    [ "$looks" -gt 4 ] || return 0
    case $outcome in
        143)
            say "training was stopped and has saved; 'run' resumes"
            return 143
            ;;
        lost | none) ;;
        *) another_lost || failed || return "$outcome" ;;
    esac
    [ -n "$keep_alive" ] && [ "$restarts" -lt "$max_restarts" ] || {
        say "error: a host has restarted; 'run' resumes from the last checkpoint"
        return 1
    }
    restarts=$((restarts + 1)) looks=0 lines=+1
    say "a host has restarted; restart $restarts of $max_restarts"
    on_all 'seeupo_jax/launch/on_host.sh stop' || {
        say "a host does not answer, or its run does not end; checking again"
        return 0
    }
    start "$@"
}

# another_lost: whether any host has restarted or does not answer.
another_lost() {
    on_all 'seeupo_jax/launch/on_host.sh code' >"$scratch/codes" || return 0
    grep -qw -e lost -e none "$scratch/codes"
}

# ask_first: sets `outcome` to the state of the first host's run. No answer does not mean that there
# is no run: installing could replace the checkout of an active run.
ask_first() {
    outcome=none script=seeupo_jax/launch/on_host.sh
    [ -z "$dry_run" ] || return 0
    for look in 1 2 3 4 5; do
        [ "$look" -eq 1 ] || sleep "$poll"
        outcome=$(on_first "test ! -e $script && echo none || $script code" \
            2>"$scratch/error" | tail -n 1)
        case $outcome in
            running | none | lost | [0-9]*) return 0 ;;
        esac
    done
    cat "$scratch/error" >&2
    say "error: the first host does not report whether training is running; see the output above." \
        "Nothing was installed or started."
    return 1
}

# begin INSTALL ARGUMENT...: starts training unless it is running, and supervises it.
begin() {
    install=$1
    shift
    ask_first || return 1
    if [ "$outcome" = running ]; then
        say "training is running; this shows its log"
    else
        [ -z "$install" ] || install_checkout || {
            say "error: the hosts could not be set up; see the output above."
            return 1
        }
        start "$@" || return 1
    fi
    code=0
    supervise "$@" || code=$?
    if [ -n "$delete_when_done" ] && [ "$code" -ne 143 ]; then
        tpu delete "$name" --force
    fi
    return "$code"
}

case $command in
    create) create ;;
    install)
        install_checkout
        [ -z "$bucket" ] || on_all "seeupo_jax/launch/on_host.sh mount $bucket"
        ;;
    run) begin '' "$@" ;;
    all) create && begin yes "$@" ;;
    resume) give_back && create && begin yes "$@" ;;
    logs) on_first 'seeupo_jax/launch/on_host.sh follow' ;;
    status)
        tpu describe "$name" '--format=value(state.state)'
        on_all 'seeupo_jax/launch/on_host.sh code'
        ;;
    stop) on_all 'seeupo_jax/launch/on_host.sh stop' ;;
    delete) tpu delete "$name" --force ;;
esac
