#!/bin/sh
# Installs what BFCL's multi-turn tasks need, without the 2.7 GB that the wheel's other parts ask for.
# Usage: sh third_party/bfcl/setup.sh [PYTHON]
set -eu
python=${1:-python3}
# shellcheck source=third_party/install.sh
. "$(dirname "$0")/../install.sh"
install "$python" --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0
