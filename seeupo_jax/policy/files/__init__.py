"""Model folders: weights, tokenizers and chat templates."""
