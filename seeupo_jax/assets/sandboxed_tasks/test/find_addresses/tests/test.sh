#!/bin/bash
cd /app
found=0
for address in ada@example.org boris@example.com lena@example.org mira.k@example.net; do
    if grep -qxF "$address" addresses.txt 2>/dev/null; then found=$((found + 1)); fi
done
exact=0
if printf "%s\n" ada@example.org boris@example.com lena@example.org mira.k@example.net |
    cmp -s - addresses.txt; then exact=1; fi
reward=$(awk "BEGIN { print 0.2 * $found + 0.2 * $exact }")
echo "{\"reward\": $reward, \"exact\": $exact}" > /logs/verifier/reward.json
