"""Where things of this repository lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
EXAMPLES = ROOT / "examples" / "math"
TINY_MODEL = EXAMPLES / "tiny_model"
