#!/bin/sh
# Trains with several processes on this machine's CPUs, as on a cluster.
set -eu
dry_run='' module=seeupo_jax.train processes=1 devices='' port='' grace=60
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"

usage() {
    cat <<END
usage: launch/cpu_processes.sh [OPTION...] --config=FILE.py --workdir=DIR [--config.FIELD=VALUE ...]

Starts processes that train together, like the hosts of a cluster. SIGTERM and SIGINT (Ctrl-C) are
sent to all of them as SIGTERM: they save and end. If one fails, the others are ended.

  -n N            number of processes (default: $processes)
  --devices M     simulate M devices in each process
  --port P        port through which they connect (default: a free one)
  --grace S       seconds from SIGTERM to SIGKILL (default: $grace)
  --module NAME   module to run (default: $module)
  --dry-run       print the commands without running them
END
}

parse "--dry-run" "--processes --devices --port --grace --module" "$@"
shift "$parsed"
check_module_arguments "$@"
check_config_file
whole_number -n "$processes"
[ -z "$role" ] || [ "$processes" -eq 1 ] || fail "-n: got $processes with --role=rollout; allowed: 1, \
since every rollout worker is a process of its own."
whole_number --grace "$grace"
[ -z "$devices" ] || whole_number --devices "$devices"
[ -z "$port" ] || whole_number --port "$port"
local_python
cd "$root"
need "$python" mkfifo

# set_variables COMMAND...: runs the command once for each environment variable to set.
set_variables() {
    "$@" JAX_PLATFORMS=cpu
    [ -z "$devices" ] || "$@" \
        XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$devices"
}

if [ "$processes" -gt 1 ] && [ -z "$port" ]; then
    port=PORT
    [ -n "$dry_run" ] ||
        port=$("$python" -c 'import socket
with socket.create_server(("localhost", 0)) as server:
    print(server.getsockname()[1])')
fi

if [ -n "$dry_run" ]; then
    set_variables quote export
else
    set_variables export
fi
if [ "$processes" -eq 1 ]; then
    [ -n "$dry_run" ] || exec "$python" -m "$module" "$@"
    quote "$python" -m "$module" "$@"
    exit 0
fi
set -- "$python" -m "$module" "$@" \
    "--coordinator=localhost:$port" "--num_processes=$processes"
if [ -n "$dry_run" ]; then
    number=0
    while [ "$number" -lt "$processes" ]; do
        printf '%s &\n' "$(quote "$@" "--process_id=$number")"
        number=$((number + 1))
    done
    echo wait
    exit 0
fi

running='' readers='' signalled='' deadline='' # running: NUMBER:PID of each process

send() {
    for process in $running; do
        kill "-$1" "${process#*:}" 2>/dev/null || true
    done
}

# on_signal NAME: the first signal lets the processes save; a second SIGINT kills them. A second
# SIGTERM does not, since `timeout` sends it to this process and then to its group.
# shellcheck disable=SC2329  # it is invoked by the trap
on_signal() {
    if [ -z "$signalled" ]; then
        signalled=1
        end_all
        say "stopping; a second Ctrl-C ends the processes without saving"
    elif [ "$1" = INT ]; then
        send KILL
    fi
}

end_all() {
    [ -n "$deadline" ] || deadline=$(($(date +%s) + grace))
    send TERM
}

# prefix NUMBER: prints each complete line after the number of its process, and keeps reading if the
# output is closed.
prefix() {
    while IFS= read -r line || [ -n "$line" ]; do
        printf '[%s] %s\n' "$1" "$line" 2>/dev/null || true
    done
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap '' PIPE
trap 'on_signal INT' INT
trap 'on_signal TERM' TERM HUP
number=0
while [ "$number" -lt "$processes" ]; do
    mkfifo "$folder/$number"
    (
        trap '' TERM INT HUP # also reads output during the shutdown
        prefix "$number" <"$folder/$number"
    ) &
    readers="$readers $!"
    (
        trap '' HUP # if the terminal is closed, they get SIGTERM instead
        exec "$@" "--process_id=$number"
    ) >"$folder/$number" 2>&1 &
    running="$running $number:$!"
    number=$((number + 1))
done
[ -z "$signalled" ] || send TERM # to those started after the signal

code=0
while [ -n "$running" ]; do
    still=''
    for process in $running; do
        if kill -0 "${process#*:}" 2>/dev/null; then
            still="$still $process"
            continue
        fi
        ended=0
        wait "${process#*:}" || ended=$?
        if [ "$ended" -ne 0 ] && [ "$code" -eq 0 ]; then
            code=$ended
            say "process ${process%%:*} ended with exit code $code"
            end_all
        fi
    done
    running=$still
    [ -n "$running" ] || break
    if [ -n "$deadline" ] && [ "$(date +%s)" -gt "$deadline" ]; then
        send KILL
    fi
    sleep 0.2 &
    wait $! || true
done
# Processes that they left behind may hold the output open: do not wait for them.
rest=25 # fifths of a second
for reader in $readers; do
    while [ "$rest" -gt 0 ] && kill -0 "$reader" 2>/dev/null; do
        rest=$((rest - 1))
        sleep 0.2
    done
    kill -KILL "$reader" 2>/dev/null || true
done
exit "$code"
