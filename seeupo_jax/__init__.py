"""SeeUPO in JAX: sequence-level policy optimisation for multi-turn language-model agents."""

import os

__version__ = "0.1.0"

# Of transformers, tokenizers and configs are used: its advice on a missing PyTorch is not.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
