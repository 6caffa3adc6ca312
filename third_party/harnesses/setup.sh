#!/bin/sh
# Installs the coding agents that config.agent.harness names, beside this file: four from npm into
# node_modules, with the Node.js that they need, and mini-SWE-agent from PyPI into .venv.
# Usage: sh third_party/harnesses/setup.sh [PYTHON]
set -eu
python=${1:-python3}
folder=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=third_party/install.sh
. "$(dirname "$0")/../install.sh"

if ! cmp -s "$folder/package-lock.json" "$folder/node_modules/installed.json"; then
    echo "Setting up $folder/node_modules ..."
    (cd "$folder" && npm install --no-save --no-audit --no-fund --loglevel=error)
    cp "$folder/package-lock.json" "$folder/node_modules/installed.json"
fi
if ! cmp -s "$folder/requirements.txt" "$folder/.venv/installed.txt"; then
    echo "Setting up $folder/.venv ..."
    "$python" -m venv --clear "$folder/.venv"
    install "$folder/.venv/bin/python" --requirement "$folder/requirements.txt"
    cp "$folder/requirements.txt" "$folder/.venv/installed.txt"
fi
