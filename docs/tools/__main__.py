"""``make docs`` writes the pages and files that are made from the package; tests fail while one is out of date."""

from areal_lora.config import json_schema
from docs.tools import configuration, support_tables

for page in (configuration, support_tables, json_schema):
    page.TARGET.write_text(page.render(), encoding="utf-8")
    print(f"wrote {page.TARGET}")
