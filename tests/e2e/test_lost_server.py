"""Three real servers; some are killed or stopped in the middle of a transfer, and come back."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from areal_lora.config.models import Config
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret, read_secret, wait_endpoint
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import make_layout
from areal_lora.weight_sync.manifest import base_digest
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer.decisions import PublishReport
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.membership import RendezvousWatch
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.clocks import wait_until
from tests.support.engine.vllm_ext.serving import (
    ADAPTER,
    PROMPT,
    RANK,
    adapter,
    hf_logits,
    make_model,
    start_server,
    token_logprobs,
)
from tests.support.forks.starter import Fork
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync.adapters import pack_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SERVERS = ["server-0", "server-1", "server-2"]
DEADLINE_S = 60.0
BUCKET_MIB = 0.015  # some thirty buckets


class Run:
    """A run folder with three servers, and a trainer of one rank."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.config = Config.model_validate(
            {
                "run": {"name": "test", "steps": 1, "root": str(folder.parent)},
                "model": {"path": str(model), "dtype": "float32"},
                "adapters": [ADAPTER],
                "trainer": {"world_size": 1},
                "rollout": {
                    "servers": 3,
                    "max_lora_rank": RANK,
                    "max_model_len": 256,
                    "max_num_seqs": 16,
                    "kv_cache_gib": 0.1,
                },
                "weight_sync": {"timeout_s": DEADLINE_S, "bucket_mib": BUCKET_MIB},
                "cluster": {"device": "cpu", "devices_per_node": 4},
            }
        )
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(self.config.model_dump_json(), encoding="utf-8")
        create_secret(RunFolder(folder))
        self.forks: list[Fork] = []
        self.processes = {name: self.start(name) for name in SERVERS}
        for name in SERVERS:
            self.wait(name)
        self.active: list[PublishReport] = []
        self.watch = RendezvousWatch(RunFolder(folder), workers=1)
        self.publisher = Publisher(
            run="test",
            config=self.config.weight_sync,
            exchange=SoloExchange(),
            secret=read_secret(RunFolder(folder)),
            leader=Leader(
                run="test",
                secret=read_secret(RunFolder(folder)),
                servers=self.watch.present(),
                config=self.config.weight_sync,
                watch=self.watch,
                on_active=self.active.append,
            ),
        )
        self.version = -1

    def start(self, name: str) -> psutil.Process:
        fork = start_server(self.folder, int(name.removeprefix("server-")), self.folder / f"{name}.log")
        self.forks.append(fork)
        return psutil.Process(fork.pid)

    def wait(self, name: str) -> None:
        process = self.processes[name]
        index = int(name.removeprefix("server-"))
        wait_endpoint(RunFolder(self.folder), "server", index, 400.0, still_alive=process.is_running)

    def restart(self, name: str) -> None:
        before = self.watch.server(int(name.removeprefix("server-")))
        self.processes[name] = self.start(name)
        wait_until(lambda: self.watch.server(int(name.removeprefix("server-"))) != before)

    def tree(self, name: str) -> list[psutil.Process]:
        """The server's process and, after it, vLLM's and their helpers."""
        return [self.processes[name], *self.processes[name].children(recursive=True)]

    def publish(self, during: Callable[[], None] | None = None) -> tuple[PublishReport, float]:
        """The next version and the seconds it took; ``during`` is called when half of it is on its way."""
        self.version += 1
        tensors = adapter(self.model, seed=self.version)
        layout = make_layout(
            self.config.adapters[0].spec(str(self.model)),
            "float32",
            {0: [(n, tuple(t.shape)) for n, t in tensors.items()]},
            {},
        )
        whole = pack_of(layout, 0, tensors)

        def pack(flat: Tensor) -> Iterator[int]:
            for done in whole(flat):
                yield done
                if done == sum(len(shard.tensors) for shard in layout.shards) // 2 and during is not None:
                    time.sleep(0.3)  # the first half arrives
                    during()

        logprobs = token_logprobs(hf_logits(self.model, tensors, PROMPT), PROMPT)
        base = token_logprobs(hf_logits(self.model, None, PROMPT), PROMPT)
        probe = ProbeExpectation(token_ids=[PROMPT], logprobs=[logprobs], base=[base])
        parent = AdapterRef(name="math", version=self.version - 1) if self.version else None
        began = time.monotonic()
        handle = self.publisher.publish(
            AdapterRef(name="math", version=self.version), parent, layout, pack, base_digest(self.model), probe
        )
        report = handle.wait()
        return report, time.monotonic() - began

    def assert_served(self, names: list[str]) -> None:
        """The newest version answers alike on exactly these servers."""
        active = self.active[-1]
        assert [s.name for s in active.servers] == names
        assert active.ref.version == self.version
        answers = []
        for server in active.servers:
            body = {"model": str(active.ref), "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            request = urllib.request.Request(
                f"{server.data_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=150) as response:
                answer = json.loads(response.read())
            assert answer["model"] == str(active.ref)
            answers.append(answer["choices"][0]["text"])
        assert len(set(answers)) == 1

    def close(self) -> None:
        trees = [p for name in SERVERS for p in self.tree_or_nothing(name)]
        for process in trees:
            process.kill()
        psutil.wait_procs(trees, timeout=60)

    def tree_or_nothing(self, name: str) -> list[psutil.Process]:
        try:
            return self.tree(name)
        except psutil.NoSuchProcess:
            return []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root = tmp_path_factory.mktemp("lost server")
    made = Run(root / "test", make_model(root / "model"))
    try:
        yield made
        made.publisher.close()
    finally:
        made.close()


def names(report: PublishReport) -> list[str]:
    return [server.name for server in report.servers]


def test_a_server_killed_during_a_transfer_then_started_again(run: Run) -> None:
    report, first_s = run.publish()
    assert names(report) == SERVERS
    run.assert_served(SERVERS)
    _, usual_s = run.publish()

    def kill() -> None:
        for process in run.tree("server-1"):
            process.kill()

    report, killed_s = run.publish(kill)
    assert killed_s < run.config.weight_sync.attempt_s, "a lost connection is noticed at once"
    assert (names(report), list(report.lost)) == (["server-0", "server-2"], ["server-1"])
    run.assert_served(["server-0", "server-2"])
    report, after_s = run.publish()
    assert (report.attempts, names(report)) == (1, ["server-0", "server-2"])

    began = time.monotonic()
    run.restart("server-1")
    restart_s = time.monotonic() - began
    seen_s = wait_until(run.publisher.changed)
    report, rejoined_s = run.publish()
    assert (report.attempts, names(report)) == (1, SERVERS)
    assert report.probe_mean_abs is not None
    assert report.probe_mean_abs < 1e-4
    run.assert_served(SERVERS)
    print(
        f"\npublish and probe: first {first_s:.2f} s, then {usual_s:.2f} s; with a server killed in the middle "
        f"{killed_s:.2f} s, after it {after_s:.2f} s; started again in {restart_s:.1f} s, seen {seen_s:.2f} s later, "
        f"publish with it {rejoined_s:.2f} s"
    )


def test_a_worker_and_a_whole_server_stopped_during_a_transfer_then_continued(run: Run) -> None:
    """Of server-2 only vLLM's process hangs: the server's own still answers HTTP. Both are lost at one deadline."""
    worker = max(run.tree("server-2")[1:], key=lambda p: p.memory_info().rss)
    stopped = [worker, *run.tree("server-0")]
    try:
        report, stopped_s = run.publish(lambda: [process.suspend() for process in stopped] and None)
        assert run.config.weight_sync.attempt_s <= stopped_s < DEADLINE_S
        assert (names(report), sorted(report.lost)) == (["server-1"], ["server-0", "server-2"])
        run.assert_served(["server-1"])
        report, after_s = run.publish()
        assert (report.attempts, names(report)) == (1, ["server-1"])
    finally:
        for process in stopped:
            process.resume()
    back_s = wait_until(lambda: run.publisher.changed() and names(run.publish()[0]) == SERVERS)
    run.assert_served(SERVERS)
    print(
        f"\nwith two servers stopped in the middle {stopped_s:.2f} s, after it {after_s:.2f} s; continued, both serve "
        f"{back_s:.2f} s later"
    )
