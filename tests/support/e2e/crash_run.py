"""A whole run whose trainer, controller or server is killed again and again, at one named point in each life.

Real trainer ranks (Megatron over gloo), the real controller, SQLite, checkpoints and weight sync; the
servers answer without a model (``stand_in``). Processes are forked from one that has imported
everything, and started again by the launcher's rules: all trainer ranks together, others alone.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import resolve_targets
from areal_lora.config.sections.run import InFlight
from areal_lora.launcher.plan import ProcessSpec, make_plan
from areal_lora.launcher.supervise import kill_sessions
from areal_lora.run_folder.paths import DesiredAdapter, DesiredAdapters, RunFolder, write_desired
from areal_lora.run_folder.rendezvous import create_secret, forget_endpoint, read_endpoint
from tests.support.distributed.spawn import forking
from tests.support.e2e import crash_child
from tests.support.engine.vllm_ext import stand_in
from tests.support.paths import EXAMPLES
from tests.support.rollout import gym_classes
from tests.support.sizes import sample

TRAINER_POINTS = (
    "trainer.batch_received",
    "trainer.annotated",
    "trainer.learned",
    "trainer.checkpoint.files_written",
    "trainer.checkpoint.manifest_written",
    "trainer.checkpoint.renamed",
    "trainer.committed",
    "trainer.publish_begun",
    "trainer.published",
)
CONTROLLER_POINTS = (
    "controller.issued",
    "controller.group_done",
    "controller.leased",
    "controller.commit_received",
    "controller.committed",
    "controller.announced",
)
SERVER_POINTS = ("server.generating", "server.receiving", "server.activated")
POINTS = {"trainer": TRAINER_POINTS, "controller": CONTROLLER_POINTS, "server": SERVER_POINTS}
ON_EVERY_RANK = ("trainer.batch_received", "trainer.annotated", "trainer.learned")
FAR_AHEAD = ("trainer.learned", "trainer.published")
PER_GROUP = ("controller.issued", "controller.group_done", "server.generating")
"""Reached several times in a step."""
NAME = "gsm8k"
PROMPTS, ETA = 4, 2
WITH_ANOTHER_SERVER, TOKEN_S = 40, 0.01
"""Steps of a run that goes on while a server is started again, and what slows it down, in seconds per token."""
WORKFLOW = {"kind": "gym", "env": f"{gym_classes.__file__}:Mortal"}
QUIET_S = 150.0
SLOW_S = 1.0
"""Of a file on a disk that is slower than a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One death: where, and when (Unix time) it was seen."""

    point: str
    times: int
    life: int
    at: float


@dataclass(slots=True)
class CrashRun:
    """``victim`` is the role that dies once at each of its points, in an order drawn from ``seed``.

    ``joined`` adapters have their own seeds and join through the desired state, in every life of a trainer again.
    ``most``: so many of the points, drawn by the commit. ``behind``: steps that training may be ahead of the disk. It
    is then slower than a step, and the victim dies in the third step of a life. With ``workers`` samples are episodes
    of two turns in a worker process, which some of them end.
    """

    root: Path
    victim: str
    seed: int
    joined: int = 0
    most: int = 99
    behind: int = 0
    in_flight: InFlight = "finish"
    workers: bool = False
    kills: list[Kill] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def folder(self) -> Path:
        how = f"{self.in_flight}{'-workers' * self.workers}"
        return self.root / f"{self.victim}-{self.seed}-{self.joined}-{self.behind}-{how}"

    @property
    def marks(self) -> Path:
        """One file for each problem that has ended a worker."""
        return self.folder / "marks"

    @property
    def seeds(self) -> dict[str, int]:
        """Of each adapter, by the name that the run has for it."""
        return {NAME: self.seed} | {f"{NAME}-{n}.1": self.seed + 100 * n for n in range(1, self.joined + 1)}

    def log(self, n: int = 40) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-n:])
            for path in sorted((self.folder / "logs").iterdir())
        )


def execute(run: CrashRun) -> CrashRun:
    """Run to the last step through all deaths. Raises AssertionError where it does not get there."""
    rng = random.Random(f"{run.victim}{run.seed}")
    points = sample(POINTS[run.victim], run.most)
    rng.shuffle(points)
    draws = [(point, rng.randint(1, 3 * PROMPTS if point in PER_GROUP else 3)) for point in points]
    draws = [(point, 3) for point in FAR_AHEAD] if run.behind else draws
    steps = WITH_ANOTHER_SERVER if run.victim == "server" else 4 + sum(min(times, 3) for _, times in draws)
    steps = steps if not run.joined else 4 + steps // (1 + run.joined)
    config = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"],
        [
            f"run.root={run.root}",
            f"run.name={run.folder.name}",
            f"run.steps={steps}",
            f"run.seed={run.seed}",
            f"adapters.gsm8k.sampling.prompts_per_step={PROMPTS}",
            "adapters.gsm8k.sampling.n_samples=2",
            "adapters.gsm8k.algorithm.behaviour_cap=1e9",
            "adapters.gsm8k.task.n_eval=8",
            "adapters.gsm8k.task.n_train=512",
            "eval.every_steps=0",
            "weight_sync.probe_tolerance=1e9",
            "weight_sync.timeout_s=60",
            f"rollout.max_staleness={ETA}",
            f"rollout.in_flight={run.in_flight}",
            f"checkpoint.max_behind={run.behind}",
            f"rollout.servers={2 if run.victim == 'server' else 1}",
            # Two ranks for the trainer's deaths: also one that is not rank 0 dies.
            *(() if run.victim == "trainer" else ("trainer.world_size=1", "trainer.ep=1")),
            *((f"adapters.gsm8k.workflow={json.dumps(WORKFLOW | {'args': {'marks': str(run.marks)}})}",) * run.workers),
            *(("service={}", f"rollout.max_adapters={1 + run.joined}") if run.joined else ()),
        ],
    )
    config = resolve_targets(config, facts := gather_facts(config, runs_here=True))
    for name in ("logs", "rendezvous", "status", run.marks.name):
        (run.folder / name).mkdir(parents=True)
    (run.folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    create_secret(RunFolder(run.folder))
    if run.joined:
        want_twins(run, config)
    began = time.monotonic()
    slow = {crash_child.SLOW_DISK_S: str(SLOW_S if run.behind else 0.05)}
    slow |= {stand_in.TOKEN_S: str(TOKEN_S)} if run.victim == "server" else {}
    with Processes(run.folder, make_plan(config, facts).processes, slow) as processes:
        for life, (point, times) in enumerate([*draws, ("", 0)]):
            index = rng.randrange(2) if run.victim == "server" or point in ON_EVERY_RANK else 0
            if run.victim == "trainer" and point not in ON_EVERY_RANK:
                index = 0
            fault = f"{point}:{times}:kill" if point else ""
            processes.start(run.victim, index, fault, life, first=life == 0)
            if not point:
                break
            at = processes.wait_killed(run, point)
            run.kills.append(Kill(point=point, times=times, life=life, at=at))
            time.sleep(rng.choice((0.0, 0.3)))
        processes.wait_end(run)
    run.wall_s = time.monotonic() - began
    return run


def want_twins(run: CrashRun, config: Config) -> None:
    """The adapters that join are like the configured one but for their seeds."""
    entry = config.adapters[0].model_dump(mode="json", exclude={"name", "seed"})
    twins = [
        DesiredAdapter(name=key.partition(".")[0], incarnation=1, adapter=entry | {"seed": seed})
        for key, seed in run.seeds.items()
        if key != NAME
    ]
    write_desired(RunFolder(run.folder), DesiredAdapters(generation=1, adapters=tuple(twins), closed=True))


class Processes:
    """The living processes of a run. Leaving it kills them all."""

    def __init__(self, folder: Path, specs: Sequence[ProcessSpec], more_env: dict[str, str]) -> None:
        self._folder, self._specs, self._more_env = folder, specs, more_env
        self._context = forking()
        self._alive: dict[str, Any] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._kill(list(self._alive))

    def start(self, victim: str, index: int, fault: str, life: int, *, first: bool) -> None:
        """A new life of ``victim``, of which process ``index`` gets the fault; everything if it is the ``first``."""
        restarted = [s for s in self._specs if s.role == victim]
        if victim == "server":
            self._hold()
        if not first:
            if victim == "server":
                restarted = [s for s in restarted if s.name not in self._alive]
            self._kill([s.name for s in restarted if s.name in self._alive])
            for spec in restarted:
                if victim != "server":
                    forget_endpoint(RunFolder(self._folder), spec.role, spec.index)
        for spec in self._specs if first else restarted:
            hit = fault if spec.role == victim and (spec.index == index or (not first and victim == "server")) else ""
            process = self._context.Process(
                target=crash_child.run,
                daemon=True,
                args=(spec.role, spec.argv[3:], spec.env | self._more_env, hit, self._folder, life),
            )
            process.start()
            self._alive[spec.name] = process

    def _hold(self) -> None:
        """Two more steps, until all servers are up: the run does not end while one is slow to start."""
        diary = self._folder / crash_child.DIARY
        taken = diary.read_text().count('"learnt"') if diary.exists() else 0
        new = self._folder / "new"
        new.write_text(str(taken + 2))
        new.replace(self._folder / crash_child.ALLOWED)

    def _let_go(self) -> None:
        for spec in (spec for spec in self._specs if spec.role == "server"):
            endpoint = read_endpoint(RunFolder(self._folder), "server", spec.index)
            if endpoint is None or spec.name not in self._alive or endpoint.pid != self._alive[spec.name].pid:
                return
        (self._folder / crash_child.ALLOWED).unlink(missing_ok=True)

    def wait_killed(self, run: CrashRun, point: str) -> float:
        """Unix time at which the victim was found dead by SIGKILL. Nothing else may end."""
        deadline = time.monotonic() + QUIET_S
        while time.monotonic() < deadline:
            at = time.time()
            self._let_go()
            ended = self._ended()
            # A peer that failed with a lost connection may be seen first.
            if -9 in ended.values() or (ended and (run.victim != "trainer" or time.monotonic() > deadline - 1.0)):
                how = f"{run.folder.name}: {ended} while {point} was waited for"
                assert -9 in ended.values(), f"{how}\n{run.log()}"
                assert all(name.startswith(run.victim) for name in ended), f"{how}\n{run.log()}"
                self._kill(list(ended))
                return at
            time.sleep(0.02)
        raise AssertionError(f"{run.folder.name}: {point} was not reached in {QUIET_S:.0f} s\n{run.log()}")

    def _ended(self) -> dict[str, int]:
        codes = {name: process.exitcode for name, process in self._alive.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def wait_end(self, run: CrashRun) -> None:
        trainers = [name for name in self._alive if name.startswith("trainer")]
        deadline = time.monotonic() + QUIET_S
        while any(self._alive[name].exitcode is None for name in trainers):
            assert time.monotonic() < deadline, f"{run.folder.name}: does not end\n{run.log()}"
            self._let_go()
            time.sleep(0.05)
        codes = {name: self._alive[name].exitcode for name in trainers}
        assert set(codes.values()) == {0}, f"{run.folder.name}: {codes}\n{run.log()}"

    def _kill(self, names: Sequence[str]) -> None:
        pids = {self._alive[name].pid for name in names}
        kill_sessions(pids)
        for name in names:
            process = self._alive.pop(name)
            with suppress(ProcessLookupError):
                process.kill()
            process.join(150)
