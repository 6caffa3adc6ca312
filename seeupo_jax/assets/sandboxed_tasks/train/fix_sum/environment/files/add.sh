#!/bin/bash
# Prints the sum of two whole numbers.
echo $(($1 - $2))
