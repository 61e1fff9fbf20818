"""``python -m areal_lora``: the same commands as ``areal-lora``."""

from __future__ import annotations

import sys

from areal_lora.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
