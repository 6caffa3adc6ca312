#!/bin/bash
set -eu
cd /app
for note in notes/*.text; do mv "$note" "${note%.text}.txt"; done
