"""docs/en/configuration.md, made from the configuration's models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from areal_lora.config import models
from areal_lora.config.models import Config
from areal_lora.config.sections.section import Section

TARGET = Path("docs/en/configuration.md")
_PLAIN: dict[type, str] = {str: "text", int: "integer", float: "number", bool: "true/false", Path: "path"}

INTRO = """\
# Configuration

This page is generated from `areal_lora/config/models.py` by `make docs`.

A run is one tree of keys. Unknown keys are errors, and the error names the nearest key.

```bash
python -m areal_lora.launch --config base.yaml --config overlay.yaml run.seed=2 adapters.0.rank=4
```

- Several `--config` files are merged in order. Maps merge key by key. Lists other than `adapters` are replaced;
  `[]` and `{}` empty lists and maps.
- Entries of `adapters` merge by `name`. If both files have exactly one entry, these merge, whatever their names.
- A section selected by `kind` is replaced as a whole when an overlay changes the kind.
- `a.b=c` sets one key after all files, a `kind` before other keys. Address an adapter by number or by name:
  `adapters.0.rank=8`.
- Relative paths of models, adapters, data files and user code are looked up next to the YAML file that sets them,
  then in the working folder. `~` is the home folder.
- `model.path` is a folder if a folder of this name exists, else a hub name if it has the form `org/name`; see below.
- `run.root` is relative to the working folder.
- A bare file name in `--config` that is not in the working folder is looked up among the shipped examples.
- Editors complete and check keys with `examples/schema.json` (`areal-lora schema`), which the first line of a file
  names: `# yaml-language-server: $schema=schema.json`.
- `target_modules` and `exclude_modules` take names, scopes, dotted paths and wildcards; see below.
- A run in the run folder is resumed. With `--fresh` the launcher moves the folder to `<name>.1`, `<name>.2`, and so
  on. Nothing is deleted.

## Models from the hub

A start resolves a hub name to the current commit of `model.revision`, and downloads the files that the cache lacks:
configuration, tokenizer and safetensors only. Cache and hub follow huggingface_hub's variables `HF_HOME`,
`HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE`. If the hub does not answer or denies access, a complete
snapshot in the cache is used. A snapshot is complete if every shard that `model.safetensors.index.json` lists exists.

`config.json` of the run records `model.commit` and `model.snapshot`. All processes read this folder. A resumed run
keeps its commit, also if the branch has moved. Another commit is refused like another model.
The exported adapter names the model by its hub name, with the commit as `revision`.

`--dry-run` and `--explain-resume` neither contact the hub nor download files.

## Targets

`target_modules` selects the modules that get LoRA, `exclude_modules` removes modules from them. Both accept these
spellings, also with `*`:

| spelling | examples |
|---|---|
| everything | `all-linear` |
| Megatron's names | `linear_qkv`, `linear_proj`, `linear_fc1`, `linear_fc2` |
| Hugging Face's names | `q_proj`, `gate_proj`, `down_proj`; for Mixtral's experts `w1`, `w2`, `w3` |
| scopes | `attention`, `mlp` (dense layers), `experts`, `shared_expert` |
| scope and name | `experts.linear_fc1`, `shared_expert.down_proj` |
| dotted paths | `*.mlp.experts.*`, `decoder.layers.*.self_attention.linear_qkv` |

q, k and v share one lora_A, and so do gate and up: naming all parts names the layer, naming only some is refused.
A path that selects only some layers or experts is refused. Router, gate of the shared expert, embeddings and output
layer are refused: the training engines adapt only projections of attention, MLP and experts.

The run uses the canonical form, which `config.json` in the run folder shows: `linear_fc1` if all its occurrences are
selected, else `expert.linear_fc1`, `mlp.linear_fc1` or `shared_expert.linear_fc1`.

## Checks

Before it starts any process, the launcher checks the configuration against the model and the machine.
It reports each problem in one line. The exit code is then 64, or 69 if a requirement is not available.

| exit code | meaning |
|---|---|
| 0 | all steps are done |
| 1 | an unexpected error; a traceback is in the log |
| 64 | the input is wrong |
| 65 | the data violate a contract: parity, staleness, alignment, a broken adapter, gradients that are not finite |
| 69 | a required program, package, device or model is not available |
| 70 | a component failed and has no restarts remaining; its last log lines were printed |
| 74 | checkpoints or records cannot be written, or none of the existing checkpoints can be read |
| 75 | of a component only: a temporary failure of another process or the network |
| 130 | interrupted |
"""


def render() -> str:
    """Return the whole page as Markdown."""
    return INTRO + "".join(_section(Config, "", "", set())) + "\n"


def _section(section: type[Section], prefix: str, description: str, known: set[str]) -> Iterator[str]:
    """``known`` has the rows of the sections that may be in its place, and gets its own."""
    fields = section.model_fields
    scalars = {name: field for name, field in fields.items() if not models.variants(field)}
    if scalars:
        yield f"\n## `{prefix.rstrip('.')}`{_chosen_by(section)}\n\n"
        if description:
            yield f"{description}\n\n"
        rows = {name: _row(name, field) for name, field in scalars.items()}
        if above := [f"`{name}`" for name, row in rows.items() if row in known]:
            yield f"As above: {', '.join(above)}.\n\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|\n"
        yield from (row for row in rows.values() if row not in known)
        known |= {*rows.values()}
    for name, field in fields.items():
        below = f"{prefix}{name}[]." if get_origin(field.annotation) is list else f"{prefix}{name}."
        description, rows_above = " ".join((field.description or "").split()), set[str]()
        for option in models.variants(field):
            yield from _section(option, below, description, rows_above)
            description = ""


def _row(name: str, field: FieldInfo) -> str:
    description = " ".join((field.description or "").split()).replace("|", "\\|")
    return f"| `{name}` | {_type(field)} | {_default(field)} | {description} |\n"


def _chosen_by(section: type[Section]) -> str:
    """Return the suffix of a section's title: its ``kind``, if only one value is possible."""
    kind = section.model_fields.get("kind")
    return f" with `kind: {kind.default}`" if kind is not None and len(get_args(kind.annotation)) == 1 else ""


def _type(field: FieldInfo) -> str:
    limits = [text for constraint in _constraints(field) if (text := _limit(constraint))]
    return _name(field.annotation) + (", " + ", ".join(limits) if limits else "")


def _constraints(field: FieldInfo) -> list[Any]:
    found = list(field.metadata)
    for option in get_args(field.annotation):
        # "PositiveFloat | None" keeps its limit on the option.
        if get_origin(option) is Annotated:
            found += get_args(option)[1:]
    return [limit for item in found for limit in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_name(option) for option in get_args(annotation))
    if origin is list:
        return f"list of {_name(get_args(annotation)[0])}"
    if origin is dict:
        value = get_args(annotation)[1]
        return "map" if value is Any or get_origin(value) in (Union, UnionType) else f"map of text to {_name(value)}"
    if origin is tuple:
        return f"list of {' and '.join(map(_name, get_args(annotation)))}"
    if origin is not None:
        return _name(get_args(annotation)[0])
    if annotation is type(None):
        return "null"
    if issubclass(annotation, Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    return _PLAIN[annotation]


def _limit(constraint: Any) -> str:
    match constraint:
        case Gt(gt=bound):
            return f"> {bound}"
        case Ge(ge=bound):
            return f">= {bound}"
        case Lt(lt=bound):
            return f"< {bound}"
        case Le(le=bound):
            return f"<= {bound}"
        case MinLen(min_length=bound):
            return f"at least {bound}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Enum):
        value = value.value
    text = str(value) if isinstance(value, (str, Path)) else json.dumps(value)
    # Line breaks would end the table's row.
    return "`" + text.replace("\n", "\\n") + "`"
