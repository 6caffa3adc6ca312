#!/bin/bash
cd /app
if printf "%s\n" host=localhost level=debug port=8080 | cmp -s - merged.conf; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
