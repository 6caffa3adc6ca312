#!/bin/bash
set -eu
cd /app
echo "hello, world" > greeting.txt
