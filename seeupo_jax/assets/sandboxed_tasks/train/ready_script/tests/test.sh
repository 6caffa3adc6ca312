#!/bin/bash
cd /app
if [ -x ready.sh ] && touch flag && [ "$(./ready.sh)" = ready ] && rm flag && ! out=$(./ready.sh) && [ -z "$out" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
