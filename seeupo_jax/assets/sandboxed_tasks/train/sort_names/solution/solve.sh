#!/bin/bash
set -eu
cd /app
sort -u names.txt > sorted.txt
