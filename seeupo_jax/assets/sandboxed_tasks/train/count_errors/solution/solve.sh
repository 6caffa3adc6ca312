#!/bin/bash
set -eu
cd /app
awk '$2 == "ERROR"' service.log | wc -l > count.txt
