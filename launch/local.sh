#!/bin/sh
# Trains on this machine. On a machine without accelerators, --devices N pretends to N devices, to
# try a mesh out before paying for one.
set -eu

usage() {
    echo "usage: launch/local.sh [--devices N] --config=FILE.py --workdir=DIR [--config.FIELD=VALUE ...]"
}

case "${1:-}" in
    -h | --help)
        usage
        exit 0
        ;;
    --devices)
        case "${2:-}" in
            '' | *[!0-9]* | 0)
                echo "error: --devices: got '${2:-}'; allowed: a whole number >= 1." >&2
                exit 2
                ;;
        esac
        export JAX_PLATFORMS=cpu
        export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$2"
        shift 2
        ;;
esac
if [ $# -eq 0 ]; then
    usage >&2
    exit 2
fi
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m seeupo_jax.train "$@"
