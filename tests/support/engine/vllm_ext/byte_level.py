"""A folder of a model, without the model, whose byte-level tokenizer declares a class of transformers."""

import json
from pathlib import Path

from tests.support.engine.vllm_ext.serving import make_tokenizer


def byte_level(folder: Path, model_type: str, tokenizer_class: str) -> Path:
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": tokenizer_class}))
    return folder
