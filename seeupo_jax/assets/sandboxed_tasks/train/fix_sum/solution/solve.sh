#!/bin/bash
set -eu
cd /app
sed -i 's/- \$2/+ $2/' add.sh
