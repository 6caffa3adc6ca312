#!/bin/sh
# Fetches libtpu, the TPU compiler, into third_party/libtpu/lib (0.7 GB): what compiling for TPUs that
# are not here needs. Beside the environment and not in it, since JAX would look for TPUs with it,
# and complain that there are none, at every start.
# Usage: sh third_party/libtpu/setup.sh [PYTHON]
set -eu
python=${1:-python3}
# shellcheck source=third_party/install.sh
. "$(dirname "$0")/../install.sh"
lib=$(dirname "$0")/lib
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "libtpu is for Linux x86_64 only: tests that compile for TPU are skipped here."
    exit 0
fi
version=$("$python" -c '
from importlib.metadata import requires
print(next(line for line in requires("jax") if line.startswith("libtpu")).partition(";")[0])')
if [ "$(cat "$lib/version" 2>/dev/null)" != "$version" ]; then
    rm -rf "$lib"
    install "$python" --no-deps --target "$lib" "$version"
    echo "$version" >"$lib/version"
fi
