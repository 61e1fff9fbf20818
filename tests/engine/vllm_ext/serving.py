"""A tiny Qwen3-MoE, adapters for it, the Hugging Face reference, and a real server process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from areal_lora.config.models import Config
from areal_lora.config.rendezvous import Endpoint, create_secret, read_secret, wait_endpoint
from areal_lora.types import AdapterRef, AdapterSpec
from areal_lora.weight_sync.digests import base_digest
from areal_lora.weight_sync.exchange import SoloExchange
from areal_lora.weight_sync.publisher import Publisher, PublishReport
from areal_lora.weight_sync.transport import AdminClient, ServerEndpoint

LAYERS, EXPERTS, HIDDEN, INTER, RANK, ALPHA = 4, 8, 128, 64, 8, 16.0
HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 2, 32, 288
TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
PROMPT = [(37 * i) % 251 + 5 for i in range(48)]  # long enough to reach every expert
Tensors = dict[str, torch.Tensor]


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}assistant:"
    tokenizer.save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=256, moe_intermediate_size=INTER,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        num_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=1, pad_token_id=0, norm_topk_prob=True,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def adapter(seed: int, b_scale: float = 0.1) -> Tensors:
    """All lora_A and lora_B under their wire names."""
    g = torch.Generator().manual_seed(seed)
    out: Tensors = {}

    def add(module: str, n_out: int, n_in: int) -> None:
        out[f"{module}.lora_A.weight"] = torch.randn(RANK, n_in, generator=g) * 0.1
        out[f"{module}.lora_B.weight"] = torch.randn(n_out, RANK, generator=g) * b_scale

    for layer in range(LAYERS):
        p = f"model.layers.{layer}"
        for name, n_out in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            add(f"{p}.self_attn.{name}_proj", n_out * HEAD_DIM, HIDDEN)
        add(f"{p}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        for e in range(EXPERTS):
            add(f"{p}.mlp.experts.{e}.gate_proj", INTER, HIDDEN)
            add(f"{p}.mlp.experts.{e}.up_proj", INTER, HIDDEN)
            add(f"{p}.mlp.experts.{e}.down_proj", HIDDEN, INTER)
    return out


def hf_logits(model: Path, tensors: Tensors | None, token_ids: list[int]) -> torch.Tensor:
    """[T, V] of Hugging Face's model with the adapter merged into its weights."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    state = hf.state_dict()
    for name in tensors or {}:
        module, sep, _ = name.partition(".lora_A.")
        if not sep:
            continue
        delta = (ALPHA / RANK) * tensors[f"{module}.lora_B.weight"] @ tensors[name]
        parts = module.split(".")
        if "experts" not in parts:
            state[f"{module}.weight"] += delta
            continue
        expert, leaf, mlp = int(parts[5]), parts[6], ".".join(parts[:5])
        if leaf == "down_proj":
            state[f"{mlp}.down_proj"][expert] += delta
        else:
            begin = INTER if leaf == "up_proj" else 0
            state[f"{mlp}.gate_up_proj"][expert, begin : begin + INTER] += delta
    hf.load_state_dict(state)
    with torch.no_grad():
        return hf(torch.tensor([token_ids])).logits[0]


def token_logprobs(logits: torch.Tensor, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """[T], entry 0 is 0.0."""
    lp = (logits[:-1] / temperature).log_softmax(-1)
    return [0.0, *lp.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()]


@dataclass
class RunningServer:
    """A server process in a run folder, with a trainer's connection to it."""

    folder: Path
    model: Path
    config: Config
    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    publisher: Publisher
    admin: AdminClient
    newest: AdapterRef | None = None

    @property
    def spec(self) -> AdapterSpec:
        return self.config.adapters[0].spec(str(self.model))

    def publish(self, tensors: Tensors, version: int | None = None, spec: AdapterSpec | None = None) -> PublishReport:
        """Publish as the next version; raises as the trainer would see it."""
        if version is None:
            version = self.newest.version + 1 if self.newest else 0
        ref = AdapterRef(name="math", version=version)
        handle = self.publisher.publish(
            ref, self.newest, spec or self.spec, list(tensors.items()), {}, base_digest(self.model), None
        )
        self.publisher._previous = None  # its error, if any, belongs to this call only
        report = handle.join()
        self.newest = ref
        return report

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.endpoint.ports['data']}{path}"

    async def post(self, session: aiohttp.ClientSession, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        async with session.post(self.url(path), json=body) as response:
            return response.status, await response.json()

    async def greedy(self, session: aiohttp.ClientSession, model: str, prompt: list[int], max_tokens: int = 24) -> Any:
        """(token ids, logprobs) of one greedy answer."""
        status, answer = await self.post(
            session, model=model, prompt=prompt, max_tokens=max_tokens, temperature=0.0, logprobs=0,
            return_token_ids=True, ignore_eos=True,
        )
        assert status == 200, answer
        choice = answer["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def start(folder: Path, model: Path) -> subprocess.Popen[bytes]:
    """Write the run folder and start a server in it; ``wait_endpoint`` tells when it serves."""
    config = Config.model_validate({
        "run": {"name": "test", "steps": 1, "root": str(folder.parent)},
        "model": {"path": str(model), "dtype": "float32"},
        "adapters": [{
            "name": "math", "rank": RANK, "alpha": ALPHA, "target_modules": TARGETS,
            "task": {"kind": "word_problems"}, "algorithm": {"kind": "grpo"}, "optimizer": {"lr": 1e-3},
            "sampling": {"prompts_per_step": 8, "n_samples": 8, "max_new_tokens": 20},
        }],
        "trainer": {"world_size": 1},
        "rollout": {"max_lora_rank": RANK, "max_model_len": 256, "max_num_seqs": 64, "kv_cache_gib": 0.1},
        "weight_sync": {"deadline_s": 8.0},
        "cluster": {"device": "cpu", "devices_per_node": 2},
    })
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    create_secret(folder)
    module = "areal_lora.engine.vllm_ext.server"
    command = [sys.executable, "-m", module, "--run-folder", str(folder), "--index", "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)


def connect(folder: Path, model: Path, process: subprocess.Popen[bytes]) -> RunningServer:
    endpoint = wait_endpoint(folder, "server", 0, 120.0, still_alive=lambda: process.poll() is None)
    config = Config.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
    secret = read_secret(folder)
    server = ServerEndpoint(host=endpoint.host, admin_port=endpoint.ports["admin"], workers=1)
    publisher = Publisher(
        run="test", sources=[0], rank=0, servers=[server], secret=secret, config=config.weight_sync,
        exchange=SoloExchange(),
    )
    return RunningServer(
        folder=folder, model=model, config=config, process=process, endpoint=endpoint, publisher=publisher,
        admin=AdminClient(server, secret),
    )


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.05)

