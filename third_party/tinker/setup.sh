#!/bin/sh
# Makes .venv beside this file, with the SDK and the cookbook of Tinker, whose programs are tested
# against `seeupo-train-server`. README.md says what is in it.
# Usage: sh third_party/tinker/setup.sh [PYTHON]
set -eu
python=${1:-python3}
folder=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=third_party/install.sh
. "$(dirname "$0")/../install.sh"

cmp -s "$folder/requirements.txt" "$folder/.venv/installed.txt" && exit
echo "Setting up $folder/.venv ..."
"$python" -m venv --clear "$folder/.venv"
# By pip, which goes on where one of several places that may have this wheel is out of reach.
"$folder/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --retries 1 \
    --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
install "$folder/.venv/bin/python" --no-deps --requirement "$folder/requirements.txt"
cp "$folder/requirements.txt" "$folder/.venv/installed.txt"
