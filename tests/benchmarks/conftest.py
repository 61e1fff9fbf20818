"""The benchmarks are scripts: each finds the modules beside it."""

import sys

from tests.support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))
