"""Facts of one node, written into a shared folder: ``python -m areal_lora.doctor.node --folder DIR``.

The doctor starts one on every node of an allocation with srun.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from areal_lora.config.models import Config
from areal_lora.doctor.probes import node_name, probe_folder, probe_node
from areal_lora.run_folder.atomic import write_file

CONFIG = "examined.json"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_lora.doctor.node", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    folder: Path = parser.parse_args(argv).folder
    config = Config.model_validate_json((folder / CONFIG).read_bytes())
    facts = probe_node(config, probe_folder(config.run.root), folder)
    write_file(folder / f"node-{node_name()}.json", msgspec.json.encode(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
