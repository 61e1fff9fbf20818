"""Tiny models of every family, adapters for them, the Hugging Face reference, and a real server process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
from safetensors.torch import load, load_file, save, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from areal_lora.config.models import Config
from areal_lora.errors import PublishError
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import Endpoint, create_secret, read_secret, wait_endpoint
from areal_lora.types import AdapterRef, AdapterSpec, ShardManifest
from areal_lora.weight_sync.admin_client import AdminClient
from areal_lora.weight_sync.layout import AdapterLayout, make_layout
from areal_lora.weight_sync.link.broadcast_groups import BroadcastGroup, GroupListener
from areal_lora.weight_sync.manifest import Announcement, base_digest, encode, shard_keys
from areal_lora.weight_sync.messages import JoinRequest, ModulesReply, PublishReply, ServerEndpoint
from areal_lora.weight_sync.trainer.publish_job import PackedShard
from tests.support.engine.vllm_ext.second_server import SECOND_RUNNER, SECOND_SERVER
from tests.support.forks.starter import Fork, starter_of
from tests.support.weight_sync.adapters import pack_of

HIDDEN, RANK, ALPHA, VOCAB = 128, 8, 16.0, 288
TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
ADAPTER = {
    "name": "math",
    "rank": RANK,
    "alpha": ALPHA,
    "target_modules": TARGETS,
    "task": {"kind": "word_problems"},
    "algorithm": {"kind": "grpo"},
    "optimizer": {"lr": 1e-3},
    "sampling": {"prompts_per_step": 8, "n_samples": 8, "max_new_tokens": 20},
    "workflow": {"kind": "agent", "path": "nowhere:agent", "tool_parser": "hermes"},
}
PROMPT = [(37 * i) % 251 + 5 for i in range(48)]  # long enough to reach every expert
CHAT_TEMPLATE = """\
{% for tool in tools or () %}{{ tool.function.name }} {% endfor -%}
{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "qwen3_moe by step": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 2,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": [0],
    },
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
}
SERVER = (sys.executable, "-m", "areal_lora.engine.vllm_ext.server.main")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
Tensors = dict[str, torch.Tensor]


def make_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def make_model(folder: Path, family: str = "qwen3_moe") -> Path:
    torch.manual_seed(0)
    make_tokenizer(folder)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    config = CONFIG_MAPPING[family.partition(" ")[0]](**(sizes | FAMILIES[family]))
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def adapter(model: Path, seed: int, b_scale: float = 0.1) -> Tensors:
    """All lora_A and lora_B, for every projection in the checkpoint and under its name there."""
    g = torch.Generator().manual_seed(seed)
    out: Tensors = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if ".layers." in name and module.rpartition(".")[2] in PROJECTIONS:
            n_out, n_in = weight.shape
            out[f"{module}.lora_A.weight"] = torch.randn(RANK, n_in, generator=g) * 0.1
            out[f"{module}.lora_B.weight"] = torch.randn(n_out, RANK, generator=g) * b_scale
    return out


@lru_cache(maxsize=16)
def merged_model(model: Path, tensors: bytes, scale: float) -> Any:
    """Hugging Face's model, read from a copy of the checkpoint with the adapter (of safetensors) merged into it."""
    state, lora = load_file(model / "model.safetensors"), load(tensors)
    for name in lora:
        module, sep, _ = name.partition(".lora_A.")
        if sep:
            state[f"{module}.weight"] += scale * lora[f"{module}.lora_B.weight"] @ lora[name]
    with tempfile.TemporaryDirectory() as merged:
        save_file(state, Path(merged) / "model.safetensors", metadata={"format": "pt"})
        (Path(merged) / "config.json").write_bytes((model / "config.json").read_bytes())
        return AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)


def hf_logits(model: Path, tensors: Tensors | None, token_ids: list[int], scale: float = ALPHA / RANK) -> torch.Tensor:
    """[T, V] of `merged_model`; the last ones are kept, since reading one takes longer than its scores."""
    hf = merged_model(model, save({n: t.clone() for n, t in (tensors or {}).items()}), scale)
    with torch.no_grad():
        return hf(torch.tensor([token_ids])).logits[0]


def token_logprobs(logits: torch.Tensor, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """[T], entry 0 is 0.0."""
    lp = (logits[:-1] / temperature).log_softmax(-1)
    return [0.0, *lp.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()]


def largest(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b)
    gaps = torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)
    return gaps.abs().max().item()  # NaN if there is one


PARTS = {
    **dict.fromkeys(("q_proj", "v_proj", "o_proj"), "attention"),
    **dict.fromkeys(("gate_proj|w1", "up_proj|w3", "down_proj|w2"), "mlp"),
    "shared_expert": "shared",
    r"layers\.1\.": "layer",
}
"""Patterns of parts of an adapter, with their kinds."""


def without(tensors: Tensors, pattern: str) -> Tensors:
    """The same adapter with lora_B = 0 where ``pattern`` matches."""
    return {n: t * 0 if "lora_B" in n and re.search(pattern, n) else t for n, t in tensors.items()}


class Source:
    """One trainer rank by hand: a real group, a real admin client, and whatever bytes a test wants to send.

    With the backend ``SOCKETS`` no other process may read its memory, as a trainer on another machine.
    """

    def __init__(
        self, admin: AdminClient, secret: str, run: str = "test", bucket_bytes: int = 65536, backend: str = "gloo"
    ) -> None:
        self.secret = secret
        self.admin, self.run, self.bucket_bytes, self.backend = admin, run, bucket_bytes, backend
        self.session = 0
        """That of its manifests; a test that starts trainers beside it raises it."""
        self._group: BroadcastGroup | None = None
        self._told: str | None = None  # the layout that the server was sent last

    def connect(self, timeout_s: float = 150.0) -> BroadcastGroup:
        if self._group is None:
            workers = self.admin.server.workers
            listener = GroupListener(
                source=0,
                bind="127.0.0.1",
                receivers=[f"worker {w}" for w in range(workers)],
                bucket_bytes=self.bucket_bytes,
                backend=self.backend,
                timeout_s=timeout_s,
                secret=self.secret,
            )
            endpoint = msgspec.structs.replace(listener.endpoint, backend="gloo")
            request = JoinRequest(
                run=self.run, endpoints=[endpoint], ranks=list(range(1, 1 + workers)), timeout_s=timeout_s
            )
            thread = threading.Thread(target=self.admin.join, args=(request, timeout_s))
            thread.start()
            self._group = listener.accept()
            thread.join()
        return self._group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._told = None

    def publish(
        self,
        ref: AdapterRef,
        layout: AdapterLayout,
        tensors: Mapping[str, torch.Tensor],
        *,
        parent: AdapterRef | None = None,
        base: str,
        run: str | None = None,
        damage: Callable[[PackedShard], None] | None = None,
        timeout_s: float = 150.0,
    ) -> PublishReply:
        """Announce and broadcast; ``damage`` may change the packed bytes. Raises what the server answers.

        A layout other than the last one goes along: the server keeps only as many as it has adapters.
        """
        group = self.connect()
        shard = PackedShard(layout, 0, shard_keys(self.secret))
        shard.pack(ref, pack_of(layout, 0, tensors))
        if damage is not None:
            damage(shard)
        manifest = ShardManifest(
            run=run or self.run, ref=ref, parent=parent, base_digest=base, layout=layout.digest, session=self.session
        )
        body = encode(
            Announcement(manifest=manifest, layout=None if layout.digest == self._told else layout, timeout_s=timeout_s)
        )
        answer: list[PublishReply | Exception] = []

        def post() -> None:
            try:
                answer.append(self.admin.publish(body, timeout_s + 15.0))
            except Exception as e:  # noqa: BLE001
                answer.append(e)

        thread = threading.Thread(target=post)
        thread.start()
        sent: PublishError | None = None
        try:
            shard.send(group, time.monotonic() + timeout_s)
        except PublishError as e:  # a server that refuses an announcement leaves its groups at once
            sent = e
        thread.join()
        failed = answer[0] if isinstance(answer[0], Exception) else sent
        if failed is not None:
            self.close()
            raise failed
        assert isinstance(answer[0], PublishReply)
        self._told = layout.digest
        return answer[0]


@dataclass
class RunningServer:
    """A server process in a run folder, with a trainer's connection to it."""

    folder: Path
    model: Path
    config: Config
    process: Fork | subprocess.Popen[bytes]
    endpoint: Endpoint
    source: Source
    admin: AdminClient
    newest: AdapterRef | None = None

    @property
    def spec(self) -> AdapterSpec:
        return self.config.adapters[0].spec(str(self.model))

    def adapter(self, seed: int, b_scale: float = 0.1) -> Tensors:
        return adapter(self.model, seed, b_scale)

    def logprobs(self, tensors: Tensors | None, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """What Hugging Face says. [T]"""
        return token_logprobs(hf_logits(self.model, tensors, token_ids), token_ids, temperature)

    def score(self, ref: AdapterRef | None, token_ids: list[int] = PROMPT, temperature: float = 1.0) -> list[float]:
        """What the server says. [T]"""
        return self.admin.score(str(ref) if ref else None, [token_ids], 120.0, temperature)[0]

    def modules(self) -> ModulesReply:
        return msgspec.msgpack.decode(self.admin.modules(120.0), type=ModulesReply)

    def layout(self, tensors: Tensors, spec: AdapterSpec | None = None, dtype: str = "float32") -> AdapterLayout:
        return make_layout(spec or self.spec, dtype, {0: [(n, tuple(t.shape)) for n, t in tensors.items()]}, {})

    def publish(
        self, tensors: Tensors, version: int | None = None, spec: AdapterSpec | None = None, **how: Any
    ) -> AdapterRef:
        """Publish as the next version, or as what ``how`` says; raises what the trainer would see."""
        if version is None:
            version = self.newest.version + 1 if self.newest else 0
        ref = AdapterRef(name="math", version=version)
        layout = how.pop("layout", None) or self.layout(tensors, spec)
        parent = self.newest if self.newest is not None and self.newest < ref else None
        base = how.pop("base", None) or base_digest(self.model)
        self.source.publish(ref, layout, tensors, parent=parent, base=base, **how)
        self.newest = ref
        return ref

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.endpoint.ports['data']}{path}"

    async def post(self, session: aiohttp.ClientSession, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        async with session.post(self.url(path), json=body) as response:
            return response.status, await response.json()

    async def greedy(self, session: aiohttp.ClientSession, model: str, prompt: list[int], max_tokens: int = 24) -> Any:
        """(token ids, logprobs) of one greedy answer."""
        status, answer = await self.post(
            session,
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0.0,
            logprobs=0,
            return_token_ids=True,
            ignore_eos=True,
        )
        assert status == 200, answer
        choice = answer["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def start(
    folder: Path,
    model: Path,
    command: Sequence[str] = SERVER,
    env: Mapping[str, str] | None = None,
    further: Sequence[Mapping[str, Any]] = (),
    differing: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    router_replay: str = "off",
    **rollout: Any,
) -> Fork | subprocess.Popen[bytes]:
    """Write the run folder and start a server in it; ``wait_endpoint`` tells when it serves.

    vLLM's is a fork of a process that has imported it, but for vLLM's second model runner (``SECOND_RUNNER`` in this
    process's environment). ``env`` is added to its environment.
    ``differing`` has what differs in the adapter ``math``, ``further`` what differs in adapters beside it.
    """
    config = Config.model_validate(
        {
            "run": {"name": "test", "steps": 1, "root": str(folder.parent)},
            "model": {"path": str(model), "dtype": dtype},
            "adapters": [ADAPTER | dict(differing or {}), *(ADAPTER | dict(other) for other in further)],
            "trainer": {"world_size": 1},
            "rollout": {"max_lora_rank": RANK, "max_model_len": 256, "max_num_seqs": 64, "kv_cache_gib": 0.1} | rollout,
            "behaviour": {"router_replay": router_replay},
            "weight_sync": {"timeout_s": 150.0},
            "cluster": {"device": "cpu", "devices_per_node": 2},
        }
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    create_secret(RunFolder(folder))
    if command is SERVER and SECOND_RUNNER in os.environ:
        command = SECOND_SERVER
    if command is SERVER:
        return start_server(folder, 0, folder / "log", env)
    argv = [*command, "--run-folder", str(folder), "--index", "0"]
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(
            argv, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(env or {})
        )


def start_server(folder: Path, index: int, log: Path, env: Mapping[str, str] | None = None) -> Fork:
    """Start server ``index`` of the run in ``folder``; ``log`` is appended to."""
    module, arguments = SERVER[-1], ["--run-folder", str(folder), "--index", str(index)]
    with log.open("ab") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(env or {})
        return starter_of("tests.support.forks.server").start(module, arguments, environment, output)


def connect(folder: Path, model: Path, process: Fork | subprocess.Popen[bytes], backend: str = "gloo") -> RunningServer:
    endpoint = wait_endpoint(RunFolder(folder), "server", 0, 300.0, still_alive=lambda: process.poll() is None)
    config = Config.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
    server = ServerEndpoint(
        name="server-0",
        host=endpoint.host,
        admin_port=endpoint.ports["admin"],
        data_port=endpoint.ports["data"],
        workers=config.rollout.tp,
    )
    secret = read_secret(RunFolder(folder))
    admin = AdminClient(server, secret)
    return RunningServer(
        folder=folder,
        model=model,
        config=config,
        process=process,
        endpoint=endpoint,
        admin=admin,
        source=Source(admin, secret, backend=backend),
    )


@contextmanager
def running_server(
    folder: Path, model: Path, *command: Any, backend: str = "gloo", **how: Any
) -> Iterator[RunningServer]:
    """A server of its own, as `start` starts it; it ends with the block, and nothing of it is left."""
    process = start(folder, model, *command, **how)
    try:
        server = connect(folder, model, process, backend)
        yield server
        server.source.close()
    finally:
        process.terminate()
        process.wait(150)


def answers_a_ping(server: RunningServer) -> bool:
    """A worker that is late counts as silent."""
    with suppress(PublishError):
        server.admin.ping(120.0)
        return True
    return False
