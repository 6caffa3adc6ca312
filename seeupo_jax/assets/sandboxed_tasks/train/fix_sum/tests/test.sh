#!/bin/bash
cd /app
if [ "$(bash add.sh 2 3)" = 5 ] && [ "$(bash add.sh -7 4)" = -3 ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
