#!/bin/bash
cd /app
if printf "%s\n" ada boris lena mira tomas | cmp -s - sorted.txt; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
