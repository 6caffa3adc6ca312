"""What users ask for, one file for each simulator, and what carries over from one to another."""
