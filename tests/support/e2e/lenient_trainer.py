"""A trainer rank that takes made-up log-probabilities, for runs whose servers are stand-ins.

``interpreter`` writes an executable for ``trainer.python``. The stand-in's answers follow no policy, so the checks that
compare them with the trainer's are lifted; everything else is the real trainer.
"""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path

from tests.support.paths import ROOT


def interpreter(path: Path) -> Path:
    """Write the executable; the launcher passes ``-m`` and the real trainer first."""
    command = f"cd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} -m {__name__}"
    path.write_text(f'#!/bin/sh\nshift 2  # -m and the real trainer\n{command} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def lift_checks() -> None:
    """Lift the checks of log-probabilities against those of the servers."""
    from areal_lora.algorithms import merging
    from areal_lora.trainer.learn import ALIGNMENT_LIMITS
    from areal_lora.weight_sync import probe

    ALIGNMENT_LIMITS["float32"] = merging.SHIFTED = probe.SHARE = math.inf


if __name__ == "__main__":
    from areal_lora.trainer.main import main

    lift_checks()
    sys.exit(main())
