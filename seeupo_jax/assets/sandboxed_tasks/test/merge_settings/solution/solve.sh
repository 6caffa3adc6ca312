#!/bin/bash
set -eu
cd /app
awk -F= '{ value[$1] = $0 } END { for (name in value) print value[name] }' base.conf override.conf |
    sort > merged.conf
