"""Where the repository's files lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SUPPORT = ROOT / "tests" / "support"
TINY = SUPPORT / "tiny_config.py"
MODELS = ROOT / "third_party" / "models"
