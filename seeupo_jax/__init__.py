"""SeeUPO in JAX: sequence-level policy optimisation for multi-turn language-model agents."""

import os

# Of transformers, tokenizers and configs are used: that it finds no PyTorch is nobody's concern.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
