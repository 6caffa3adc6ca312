#!/bin/bash
set -eu
cd /app
grep -oE '[a-z.]+@[a-z]+\.[a-z]+' letters.txt | sort -u > addresses.txt
