#!/bin/sh
# Trains on this machine's GPUs or other accelerators, as one process.
set -eu
dry_run='' module=seeupo_jax.train gpus=''
# shellcheck source=launch/common.sh
. "$(dirname "$0")/common.sh"

usage() {
    cat <<END
usage: launch/gpu_local.sh [OPTION...] --config=FILE.py --workdir=DIR [--config.FIELD=VALUE ...]

Trains on all accelerators of this machine. Rerunning the command resumes from the last checkpoint.

  --gpus LIST     use only these GPUs, such as 0,1
  --module NAME   module to run (default: $module)
  --dry-run       print the commands without running them
END
}

parse "--dry-run" "--gpus --module" "$@"
shift "$parsed"
check_module_arguments "$@"
check_config_file
case $gpus in
    *[!0-9,]* | ,* | *, | *,,*) fail "--gpus: got '$gpus'; allowed: numbers, as in 0,1." ;;
esac
local_python
cd "$root"
need "$python"
if [ -n "$gpus" ]; then
    if [ -z "$dry_run" ]; then
        export CUDA_VISIBLE_DEVICES="$gpus"
    else
        quote export CUDA_VISIBLE_DEVICES="$gpus"
    fi
fi
if [ -z "$dry_run" ]; then
    found=$("$python" -c 'import jax; print(jax.default_backend(), jax.device_count())') ||
        fail "JAX does not start; see the output above."
    case $found in
        cpu*)
            fail "JAX finds no accelerator; allowed: a GPU and jax[cuda13], or a TPU and jax[tpu]; \
launch/cpu_processes.sh is for CPUs."
            ;;
    esac
    say "devices: $found"
    exec "$python" -m "$module" "$@"
fi
run "$python" -m "$module" "$@"
