#!/bin/bash
set -eu
cd /app
ls -S data | head -n 1 > largest.txt
