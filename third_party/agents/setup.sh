#!/bin/sh
# Makes two environments beside this file, with the SDKs and frameworks whose agents are tested:
# .venv, and verifiers/.venv, since verifiers needs an older openai. README.md says what is in them.
# Usage: sh third_party/agents/setup.sh [PYTHON]
set -eu
python=${1:-python3}
folder=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=third_party/install.sh
. "$(dirname "$0")/../install.sh"

# environment FOLDER: FOLDER/.venv with what FOLDER/requirements.txt names.
environment() {
    cmp -s "$1/requirements.txt" "$1/.venv/installed.txt" && return
    echo "Setting up $1/.venv ..."
    "$python" -m venv --clear "$1/.venv"
    install "$1/.venv/bin/python" --requirement "$1/requirements.txt"
    cp "$1/requirements.txt" "$1/.venv/installed.txt"
}

environment "$folder"
environment "$folder/verifiers"
