# shellcheck shell=sh
# shellcheck disable=SC2154  # tpu_vm.sh sets the options and `scratch`, a folder
# Functions for a Cloud TPU as a queued resource: its state, its request, its hosts. tpu_vm.sh
# sources it after common.sh; it runs nothing itself.

# tpu [alpha] VERB ARGUMENT...: runs gcloud on the queued resource.
tpu() {
    track=''
    [ "$1" != alpha ] || {
        track=alpha
        shift
    }
    verb=$1
    shift
    run gcloud $track compute tpus queued-resources "$verb" "$@" "--zone=$zone" \
        ${project:+"--project=$project"} --quiet
}

# Hosts without external addresses are reached through Google's Identity-Aware Proxy.
on_all() {
    tpu ssh "$name" --node=all --worker=all ${internal_ips:+--tunnel-through-iap} "--command=$1"
}

on_first() {
    tpu ssh "$name" --node=0 --worker=0 ${internal_ips:+--tunnel-through-iap} "--command=$1"
}

# ask_state EXPECTED: sets `state`; a dry run sets it to EXPECTED.
ask_state() {
    if [ -n "$dry_run" ]; then
        tpu describe "$name" '--format=value(state.state)'
        state=$1
    elif state=$(tpu describe "$name" '--format=value(state.state)' 2>"$scratch/error"); then
        :
    elif grep -q NOT_FOUND "$scratch/error"; then
        state=ABSENT
    else
        cat "$scratch/error" >&2
        state=UNKNOWN
    fi
}

wait_until_active() {
    end=$(($(date +%s) + wait_limit)) last=''
    while :; do
        ask_state ACTIVE
        [ "$state" = "$last" ] || say "$name is $state"
        last=$state
        case $state in
            ACTIVE) return 0 ;;
            FAILED | SUSPENDING | SUSPENDED | DELETING | ABSENT)
                tpu describe "$name" '--format=yaml(state)' >&2 || true
                say "error: $name became $state instead of ACTIVE; see the output above. Delete it with" \
                    "'$0 delete', then ask again, for another zone or type."
                return 1
                ;;
        esac
        if [ "$(date +%s)" -ge "$end" ]; then
            say "error: $name is $state after $wait_limit s (--wait-limit); it stays in the queue" \
                "until '$0 delete'."
            return 1
        fi
        sleep "$poll"
    done
}

request() {
    if [ "$slices" -eq 1 ]; then
        set -- "--node-id=$name"
    else
        set -- "--node-count=$slices" "--node-prefix=$name"
    fi
    # Only gcloud alpha has --reservation.
    tpu ${reservation:+alpha} create "$name" "--accelerator-type=$accelerator_type" \
        "--runtime-version=$runtime_version" "$@" ${spot:+--spot} ${reserved:+--reserved} \
        ${reservation:+"--reservation=$reservation"} \
        ${valid_until_duration:+"--valid-until-duration=$valid_until_duration"} \
        ${valid_until_time:+"--valid-until-time=$valid_until_time"} \
        ${service_account:+"--service-account=$service_account"} \
        ${network:+"--network=$network"} ${subnetwork:+"--subnetwork=$subnetwork"} \
        ${internal_ips:+--internal-ips} || {
        say "error: the request for the TPU was rejected; see the output above."
        return 1
    }
}

create() {
    ask_state ABSENT
    case $state in
        ABSENT) request || return 1 ;;
        UNKNOWN)
            say "error: gcloud does not report the state of $name; see the output above."
            return 1
            ;;
        *) say "$name already exists" ;;
    esac
    wait_until_active
}

# give_back: deletes the TPU in any state.
give_back() {
    ask_state ACTIVE
    [ "$state" = ABSENT ] || tpu delete "$name" --force
}
