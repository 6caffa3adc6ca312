#!/bin/bash
set -eu
cd /app
awk -F, 'NR > 1 { sum += $2 } END { print sum }' prices.csv > total.txt
