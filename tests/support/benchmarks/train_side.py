"""``benchmarks/train_sides.py`` in a fork; the arguments are the script's."""

import runpy
import sys

from tests.support.paths import ROOT

if __name__ == "__main__":
    sys.path.append(str(ROOT / "benchmarks"))
    runpy.run_path(str(ROOT / "benchmarks" / "train_sides.py"), run_name="__main__")
