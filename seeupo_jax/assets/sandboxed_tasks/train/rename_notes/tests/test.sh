#!/bin/bash
cd /app
if [ "$(ls notes | tr "\n" " ")" = "monday.txt plan.md tuesday.txt " ] && [ "$(cat notes/monday.txt)" = "call Ada" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
