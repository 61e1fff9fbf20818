"""Where the rows of a shard come from: torch's own split, and what transformers itself loads."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lora.config.models import ModelConfig
from areal_lora.engine.common import model_folder
from areal_lora.engine.common.model_folder import ModelFolder, share
from areal_lora.engine.fsdp_utils.model import Sources, shard_rows
from areal_lora.errors import UnknownTensorError
from tests.support.families.tiny_families import TINY, save

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("n", [1, 4, 5, 7, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_rows_of_a_shard_are_those_of_torch(n: int, world: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(n).chunk(world)]
    chunks += [[]] * (world - len(chunks))
    assert [list(range(*shard_rows(n, rank, world))) for rank in range(world)] == chunks


@pytest.mark.parametrize("kind", sorted(TINY))
@pytest.mark.parametrize("shared", [False, True])
def test_every_parameter_is_found_as_transformers_finds_it(
    kind: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(kind, tmp_path)
    # This process ends late: what it holds must not look like what another test has left in shared memory.
    monkeypatch.setattr(model_folder, "share", partial(share, memory=tmp_path))
    sources = Sources(ModelFolder.of(ModelConfig(path=str(folder), shared_memory=shared)), kind, TIED)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        start, stop = len(parameter) // 3, len(parameter)
        assert torch.equal(sources.rows(name, start, stop), parameter[start:]), name
    with pytest.raises(UnknownTensorError, match=r"no_such\.weight"):
        sources.rows("no_such.weight", 0, 1)


def test_a_tied_output_layer_reads_the_embeddings(tmp_path: Path) -> None:
    folder = save("qwen2", tmp_path)
    only = ModelFolder.of(ModelConfig(path=str(folder)))
    only._files.pop("lm_head.weight")
    assert torch.equal(
        Sources(only, "qwen2", TIED).rows("lm_head.weight", 0, 64), only.whole("model.embed_tokens.weight")
    )
