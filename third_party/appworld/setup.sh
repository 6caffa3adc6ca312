#!/bin/sh
# Makes .venv beside this file, with AppWorld in it; README.md says whose it is and what may be shared.
# Usage: sh third_party/appworld/setup.sh [PYTHON]
set -eu
python=${1:-python3}
version=0.1.3.post1
folder=$(cd "$(dirname "$0")" && pwd)
venv=$folder/.venv
ready=$venv/appworld-$version

[ -f "$ready" ] && exit 0
echo "Setting up AppWorld $version (230 MB) in $venv ..."
# shellcheck source=third_party/install.sh
. "$(dirname "$0")/../install.sh"
"$python" -m venv --clear "$venv"
install "$venv/bin/python" "appworld==$version"
# The package brings its apps encrypted, and its own tests, which go to a cache.
if ! log=$(APPWORLD_CACHE="$venv/cache" "$venv/bin/appworld" install 2>&1); then
    echo "third_party/appworld/setup.sh: appworld install failed: $log" >&2
    exit 1
fi
touch "$ready"
