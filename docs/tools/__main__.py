"""``make docs`` writes the pages and files that are made from the package; tests fail while one is out of date."""

from pathlib import Path

from areal_lora.config.models import json_schema
from docs.tools import configuration, sizes, support_tables

for target, text in (
    (configuration.TARGET, configuration.render()),
    (support_tables.TARGET, support_tables.render()),
    (sizes.TARGET, sizes.render()),
    (Path("examples/schema.json"), json_schema()),
):
    target.write_text(text, encoding="utf-8")
    print(f"wrote {target}")
