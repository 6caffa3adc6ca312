#!/bin/sh
# Makes .venv beside this file, with Tinker's SDK and cookbook, whose programs are tested against
# `seeupo-train-server`. README.md says what is in it.
# Usage: sh third_party/tinker/setup.sh [PYTHON]
set -eu
python=${1:-python3}
folder=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=third_party/install.sh
. "$(dirname "$0")/../install.sh"

cmp -s "$folder/requirements.txt" "$folder/.venv/installed.txt" && exit
echo "Setting up $folder/.venv ..."
"$python" -m venv --clear "$folder/.venv"
install_torch "$folder/.venv/bin/python"
install "$folder/.venv/bin/python" --no-deps --requirement "$folder/requirements.txt"
cp "$folder/requirements.txt" "$folder/.venv/installed.txt"
