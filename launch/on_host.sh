#!/bin/sh
# Runs on the hosts of a cluster for the launch scripts: sets a host up, runs a command, follows and
# stops it.
set -eu
state=${HOME:-/tmp}/seeupo_jax_run # log, pid and exit code of the run that `start` started
boot=/proc/sys/kernel/random/boot_id # changes whenever the machine starts
stopped_code=143 # a run that saved and ended after SIGTERM

usage() {
    cat <<END
usage: launch/on_host.sh run [--code FILE] [--alone] COMMAND...
                                            run the command and forward SIGTERM to it
       launch/on_host.sh start [--alone] COMMAND...
                                            run it in the background; log: $state/log
       launch/on_host.sh follow [LINES]     show the log (its last LINES) until the run ends
       launch/on_host.sh code               print its exit code, or: running, lost, none
       launch/on_host.sh stop [SECONDS]     send SIGTERM and wait until the run ends
       launch/on_host.sh install REQUIREMENT [COMMAND]   create .venv with this package and a
                                            requirement such as jax[tpu]; run COMMAND
       launch/on_host.sh mount BUCKET       mount a Cloud Storage bucket as /mnt/BUCKET

If a command ends with 0 after SIGTERM, it was only stopped: the exit code is then $stopped_code, so
that the platform starts it again. With --code this number is written to FILE, and run ends with 0.
With --alone it uses the devices of this host, whatever the platform says of other hosts.
END
}

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

run() {
    file='' stopped=''
    while :; do
        case ${1-} in
            --code)
                file=${2:?}
                shift
                ;;
            --alone) leave_cluster ;;
            *) break ;;
        esac
        shift
    done
    [ $# -gt 0 ] || fail "run: got no command; allowed: one."
    pid=''
    trap 'stopped=${stopped}1; test -z "$pid" || kill -TERM "$pid" 2>/dev/null || true' TERM INT HUP
    "$@" &
    pid=$!
    [ -z "$stopped" ] || kill -TERM "$pid"
    waited=never
    # A signal interrupts `wait` even if the command has not ended.
    until [ "$waited" = "$stopped" ]; do
        waited=$stopped code=0
        wait "$pid" || code=$?
    done
    reported=$code
    if [ -n "$stopped" ] && [ "$code" -eq 0 ]; then
        reported=$stopped_code
    fi
    [ -n "$file" ] || exit "$reported"
    echo "$reported" >"$file.new"
    mv "$file.new" "$file"
    exit "$code"
}

# leave_cluster: removes what makes JAX and libtpu wait for other hosts. On GKE, libtpu needs the names
# of a slice's hosts, also of a slice of one host.
leave_cluster() {
    unset MEGASCALE_COORDINATOR_ADDRESS MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID MEGASCALE_PORT \
        TPU_PROCESS_ADDRESSES
    [ -z "${TPU_WORKER_HOSTNAMES-}" ] || export TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0
}

code() {
    if [ ! -f "$state/pid" ]; then
        echo none
    elif [ ! -f "$state/code" ] && kill -0 "$(cat "$state/pid")" 2>/dev/null && same_boot; then
        echo running
    elif [ -f "$state/code" ]; then # written before the run ends
        cat "$state/code"
    else
        echo lost
    fi
}

# same_boot: whether the host has not restarted since `start`; if it has, the pid is that of another
# process. Runs that an earlier version started have no such file.
same_boot() {
    [ ! -f "$state/boot" ] || [ "$(cat "$state/boot")" = "$(cat "$boot")" ]
}

start() {
    [ $# -gt 0 ] || fail "start: got no command; allowed: one."
    [ "$(code)" != running ] || fail "a run is active on this host; stop it first."
    mkdir -p "$state"
    rm -f "$state/code"
    cat "$boot" >"$state/boot"
    : >>"$state/log" # exists at once, for `follow`
    (run --code "$state/code" "$@") </dev/null >>"$state/log" 2>&1 &
    echo $! >"$state/pid"
}

follow() {
    [ -f "$state/log" ] || fail "no run was started on this host."
    [ "$(code)" = running ] || exec tail -n "${1-+1}" "$state/log"
    # Ends with the run, after reading the rest of the log.
    exec tail -n "${1-+1}" -f --pid="$(cat "$state/pid")" "$state/log"
}

stop() {
    [ "$(code)" = running ] || return 0
    kill -TERM "$(cat "$state/pid")"
    left=${1-300}
    while [ "$(code)" = running ]; do
        [ "$left" -gt 0 ] || fail "the run did not end within ${1-300} s of SIGTERM."
        sleep 1
        left=$((left - 1))
    done
}

# The Python of a TPU VM may be older than 3.11, so uv installs its own. An environment that uv
# creates has no pip, so the set-up scripts in third_party use uv from it.
install() {
    cd "$(dirname "$0")/.."
    export PIP_BREAK_SYSTEM_PACKAGES=1 # only uv is installed among the system's packages
    python3 -m pip install --user --quiet --disable-pip-version-check uv
    [ -x .venv/bin/python ] || python3 -m uv venv --quiet --python 3.12 .venv
    python3 -m uv pip install --quiet --python .venv/bin/python --editable '.[gcs]' "${1:?}" uv
    [ -z "${2-}" ] || sh -c "$2"
}

mount_bucket() {
    mountpoint -q "/mnt/$1" && return 0
    if ! command -v gcsfuse >/dev/null; then
        key=/usr/share/keyrings/cloud.google.asc
        curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee "$key" >/dev/null
        echo "deb [signed-by=$key] https://packages.cloud.google.com/apt" \
            "gcsfuse-$(lsb_release -cs) main" |
            sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
        sudo apt-get update -qq
        # A new machine may be installing its updates.
        sudo apt-get -o DPkg::Lock::Timeout=300 install -qq -y gcsfuse
    fi
    sudo mkdir -p "/mnt/$1"
    sudo chown "$(id -u):$(id -g)" "/mnt/$1"
    # Checkpoints and policies are renamed as folders, which gcsfuse refuses by default. Other hosts
    # must see what one host has written; some machines cache metadata for ever by default.
    gcsfuse --implicit-dirs --rename-dir-limit=200000 --metadata-cache-ttl-secs=0 \
        --metadata-cache-negative-ttl-secs=0 "$1" "/mnt/$1"
}

what=${1-}
[ $# -eq 0 ] || shift
case $what in
    run | start | follow | code | stop | install) "$what" "$@" ;;
    mount) mount_bucket "${1:?}" ;;
    -h | --help) usage ;;
    *)
        usage >&2
        exit 2
        ;;
esac
