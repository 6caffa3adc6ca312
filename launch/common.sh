# shellcheck shell=sh
# Options, checks and dry runs, shared by the launch scripts, which source it; it runs nothing
# itself. A script that sources it defines the function `usage` and sets `dry_run` and `module`.

# As on_host.sh mounts a bucket: folders can be renamed, and hosts see what others write.
# shellcheck disable=SC2034  # jobset.sh reads it
bucket_options=implicit-dirs,rename-dir-limit=200000,metadata-cache-ttl-secs=0,\
metadata-cache-negative-ttl-secs=0

root=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    printf 'error: %s\n' "$1" >&2 # echo would read backslashes
    exit 2
}

# say WORD...: prints to stderr; a dry run prints only commands.
say() {
    # Continues if the output is closed, for example after the terminal was closed.
    [ -n "$dry_run" ] || printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2 || true
}

# quote WORD...: prints one line that a shell parses as exactly these words.
quote() {
    (
        LC_ALL=C
        line=
        for word in "$@"; do
            case $word in
                '' | *[!A-Za-z0-9_./:=@%+,-]*)
                    word="'$(printf '%s\n' "$word" | sed "s/'/'\\\\''/g")'"
                    ;;
            esac
            line="$line${line:+ }$word"
        done
        printf '%s\n' "$line"
    )
}

# run COMMAND...: runs the command; a dry run only prints it.
run() {
    if [ -n "$dry_run" ]; then
        quote "$@"
    else
        "$@"
    fi
}

# choose_command ALLOWED WORD: sets `command` to the word, which is one of those allowed.
choose_command() {
    case $2 in
        -h | --help)
            usage
            exit 0
            ;;
    esac
    for command in $1; do
        [ "$command" != "$2" ] || return 0
    done
    fail "got '$2'; allowed: $(echo "$1" | sed 's/ /, /g')."
}

# parse FLAGS OPTIONS ARGUMENT...: sets the variable of each option (--node-count=2: node_count=2)
# up to the first argument for the module, and `parsed` to the number of parsed arguments. A value
# that begins with -- is accepted only after =; else an unquoted empty variable would swallow an
# option.
parse() {
    flags=$1 options=$2 parsed=0
    shift 2
    while [ $# -gt 0 ]; do
        case $1 in
            -h | --help)
                usage
                exit 0
                ;;
            --config* | --workdir*) return 0 ;;
            --)
                parsed=$((parsed + 1))
                return 0
                ;;
            -n)
                shift
                set -- --processes "$@"
                ;;
        esac
        given=${1%%=*}
        variable=$(printf '%s' "${given#--}" | tr - _)
        case $given in
            --*[!a-z-]* | [!-]* | -[!-]*) given='?' ;;
        esac
        case " $flags " in
            *" $given "*)
                [ "$1" = "$given" ] || fail "$given: got a value, '${1#*=}'; allowed: none."
                eval "$variable=1"
                shift
                parsed=$((parsed + 1))
                continue
                ;;
        esac
        case " $options " in
            *" $given "*) ;;
            *) fail "got '$1'; allowed: $flags $options, and then --config=... --workdir=..." ;;
        esac
        value=
        case $1 in
            *=*) value=${1#*=} ;;
            *)
                case ${2-} in
                    --*) ;;
                    *) value=${2-} ;;
                esac
                shift $(($# > 1))
                parsed=$((parsed + 1))
                ;;
        esac
        [ -n "$value" ] || fail "$given: got nothing; allowed: a value."
        eval "$variable=\$value"
        shift
        parsed=$((parsed + 1))
    done
}

# whole_number NAME VALUE
whole_number() {
    case $2 in
        '' | *[!0-9]* | 0*) fail "$1: got '$2'; allowed: a whole number >= 1." ;;
    esac
}

# required NAME VALUE EXAMPLE
required() {
    [ -n "$2" ] || fail "$1: got nothing; allowed: a value such as $3."
}

# cloud_name NAME VALUE [MOST]: checks a name for Google Cloud and Kubernetes.
cloud_name() {
    case $2 in
        *[!a-z0-9-]* | [!a-z]* | *-)
            fail "$1: got '$2'; allowed: lower-case letters, digits and '-', first a letter."
            ;;
    esac
    [ ${#2} -le "${3-40}" ] || fail "$1: got ${#2} characters; allowed: at most ${3-40}."
}

# bucket_name VALUE
bucket_name() {
    case $1 in
        *[!a-z0-9._-]*) fail "--bucket: got '$1'; allowed: the name alone, as in my-bucket." ;;
    esac
}

# check_mounted: checks paths for a new machine, on which only --bucket is mounted below /mnt.
# shellcheck disable=SC2154  # the script that sources it has the option --bucket
check_mounted() {
    for given in "--workdir=$workdir" "--config.checkpoint.directory=$checkpoints"; do
        case $given in
            *=/mnt/?*)
                wanted=${given#*=/mnt/} wanted=${wanted%%/*}
                [ "$bucket" = "$wanted" ] ||
                    fail "--bucket: got '$bucket'; allowed: '$wanted', as in $given."
                ;;
        esac
    done
}

# need TOOL...: checks that the tools are installed; a dry run needs none.
need() {
    [ -z "$dry_run" ] || return 0
    for tool in "$@"; do
        command -v "$tool" >/dev/null || fail "'$tool' is not installed, or not on PATH."
    done
}

# check_module_arguments ARGUMENT...: checks the module's arguments before anything is started.
check_module_arguments() {
    config='' workdir='' checkpoints='' checkpoint_group='' role='' port_set='' host_set='' before=''
    for argument in "$@"; do
        case $before in
            --override | --role) argument=$before=$argument ;;
        esac
        before=$argument
        case $argument in
            --override=*) argument=--config.${argument#--override=} ;; # an equivalent form
        esac
        case $argument in
            *'
'*) fail "got an argument of several lines; allowed: one line each." ;;
            --config=?*) config=${argument#--config=} ;;
            --workdir=?*) workdir=${argument#--workdir=} ;;
            --role=rollout) role=rollout ;;
            --config.rollout.port=?*) port_set=1 ;;
            --config.rollout.host=?*) host_set=1 ;;
            --config.checkpoint=*) checkpoints='' checkpoint_group=${argument#*=} ;;
            --config.checkpoint.directory=[Nn][Oo][Nn][Ee]) checkpoints='' checkpoint_group='' ;;
            --config.checkpoint.directory=*) checkpoints=${argument#*=} checkpoint_group='' ;;
            --help | -h | --dry-run)
                fail "$argument: got it after --config or --workdir; allowed: before them."
                ;;
        esac
    done
    required --config "$config" "--config=configs/quickstart.py"
    required --workdir "$workdir" "--workdir=runs/quickstart"
}

# check_kept: checks that checkpoints are in a bucket, as preemptible machines need.
check_kept() {
    [ -z "$checkpoint_group" ] || fail "--config.checkpoint: got '$checkpoint_group', whose folder \
this script does not read; allowed: its fields, as --config.checkpoint.directory=gs://BUCKET/DIR."
    setting=--workdir where=$workdir
    [ -z "$checkpoints" ] || setting=--config.checkpoint.directory where=$checkpoints
    case $setting:$where in
        *:/mnt/?* | --config*:gs://?*) ;;
        *) fail "$setting: got '$where', which is lost with the machine; allowed: a folder of a \
bucket, /mnt/BUCKET/DIR, or --config.checkpoint.directory=gs://BUCKET/DIR." ;;
    esac
}

# check_listening: checks that a trainer lets rollout workers of other machines in.
check_listening() {
    [ -z "$port_set" ] || [ -n "$role$host_set" ] || fail "--config.rollout.host: got nothing with \
--config.rollout.port; allowed: an address that workers on other machines reach, such as 0.0.0.0."
}

# check_worker OPTION TYPE: with --role=rollout, checks that the process is alone on one host and
# shares the trainer's folder. The largest host has 8 chips (v5e, v6e) or 8 TensorCores.
# shellcheck disable=SC2154  # the script that sources it has the option --slices
check_worker() {
    [ -n "$role" ] || return 0
    case $workdir in
        /mnt/?*) ;;
        *) fail "--workdir: got '$workdir' with --role=rollout; allowed: the trainer's, a folder of \
a bucket, /mnt/BUCKET/DIR." ;;
    esac
    [ "$slices" -eq 1 ] || fail "--slices: got $slices with --role=rollout; allowed: 1, since each \
worker has a name, and restarts, of its own."
    number=${2##*-}
    case $number in
        '' | *[!0-9]*) ;;
        *)
            [ "$number" -le 8 ] || fail "$1: got '$2' with --role=rollout; allowed: one host, such \
as v6e-8 or v5p-8, since every host is a worker of its own."
            ;;
    esac
}

# check_config_file: for scripts that run this checkout; paths are relative to its top. Text after
# .py: is the argument of the file's get_config; package:NAME and module:function are not files.
check_config_file() {
    case $config in
        *.py:*) file=${config%%.py:*}.py ;;
        *.py) file=$config ;;
        *:*) return 0 ;;
        *) file=$config ;;
    esac
    case $file in
        /*) [ -f "$file" ] ;;
        *) [ -f "$root/$file" ] ;;
    esac || fail "--config: got '$config'; allowed: a file, relative to $root, or package:NAME."
}

# local_python: sets `python` to the interpreter that has this package.
local_python() {
    python=.venv/bin/python
    [ -x "$root/$python" ] || python=python3
}
