"""``python -m areal_lora.launch --config X.yaml ...``: the same as ``areal-lora train``."""

import sys
from collections.abc import Sequence

from areal_lora.cli import app


def main(arguments: Sequence[str] | None = None) -> int:
    return app.main(["train", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
