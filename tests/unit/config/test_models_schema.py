"""The schema for editors is up to date, accepts the shipped examples and marks mistakes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from areal_lora.config.models import json_schema
from tests.support.paths import ROOT

SHIPPED = ROOT / "examples" / "schema.json"
FILES = sorted((ROOT / "examples").glob("*/*.yaml"))
SCHEMA = json.loads(json_schema())

MAX_KEYS = 250


def problems(data: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(data)]


def test_the_shipped_file_is_up_to_date() -> None:
    assert SHIPPED.read_text(encoding="utf-8") == json_schema(), "run make docs"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_examples_name_the_schema_and_fit_it(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (file.parent / first.partition("=")[2]).resolve() == SHIPPED
    assert problems(yaml.safe_load(text)) == []


def test_keys_may_only_become_fewer() -> None:
    """A setting that no user would choose is a constant with its reason; lower the number with each key that goes."""
    sections = [SCHEMA, *SCHEMA["$defs"].values()]
    assert sum(len(section.get("properties", {})) for section in sections) <= MAX_KEYS


def test_mistakes_are_marked() -> None:
    data = yaml.safe_load((ROOT / "examples" / "math" / "embedded.yaml").read_text(encoding="utf-8"))
    assert problems(data) == []
    for path, value in (("rollout.serverz", 1), ("run.steps", "many"), ("cluster.device", "tpu")):
        wrong = copy.deepcopy(data)
        section, key = path.split(".")
        wrong[section][key] = value
        assert problems(wrong), path
