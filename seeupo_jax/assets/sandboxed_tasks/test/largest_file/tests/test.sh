#!/bin/bash
cd /app
if [ "$(tr -d "[:space:]" < largest.txt 2>/dev/null)" = b.bin ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
