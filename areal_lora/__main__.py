"""``python -m areal_lora``: the same commands as ``areal-lora``."""

import sys

from areal_lora.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
