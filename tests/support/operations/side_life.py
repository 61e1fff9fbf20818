"""One life of a trainer whose adapters clients drive: ``python -m tests.support.operations.side_life ROOT NAME...``.

It ends by a fault (`AREAL_LORA_FAULT`) or a signal; the next life resumes from what is on the disk.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.support.operations.side import Side

BEHIND = 2
"""Steps that it may be ahead of the disk."""

if __name__ == "__main__":
    Side(Path(sys.argv[1]), *sys.argv[2:], client=None, max_behind=BEHIND)
    signal.pause()
