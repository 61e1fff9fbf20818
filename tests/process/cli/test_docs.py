"""Every command of README.md and docs/en, as printed, in a folder where the words it uses for names are names.

``HOW`` has each of them. A command in a page that is not in ``HOW`` fails, and so does one of ``HOW`` that no page has.
"""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from areal_lora.cli.app import build
from tests.support.cli import held_run
from tests.support.cli.command import forked_python, programs
from tests.support.clocks import wait_until
from tests.support.docs import LANGUAGES, PAGES, blocks, commands, inline
from tests.support.obs.fake_run import make_run
from tests.support.paths import ROOT, TINY_MODEL
from tests.support.sizes import sample

pytestmark = pytest.mark.slow
MOE, EMBEDDED = "examples/math/gsm8k_grpo_megatron_lora_moe.yaml", "examples/math/embedded.yaml"
CONFIGS = f"--config {MOE} --config {EMBEDDED}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run it. ``instead`` replaces words that cannot be names of files; ``more`` is appended."""

    instead: tuple[tuple[str, str], ...] = ()
    more: str = ""
    code: int = 0
    says: str = ""
    live: bool = False  # needs the run that works


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """``make -n``: what it would start is planned (``--dry-run``)."""

    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Run by ``test``, ``path::function``, because it needs what ``why`` names."""

    test: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """Run by no test, because it needs what ``why`` names."""

    why: str


How = Run | Make | Elsewhere | Unseen
PLAN = Run(more="--dry-run", says="nothing is started")
NO_RUN = Run(code=64, says="no run is in progress there")
E2E = "tests/e2e/test_embedded_run.py"
FIREWALL = Elsewhere(
    test="tests/process/cli/test_firewall.py::test_only_nodes_and_the_node_itself_reach_the_ports", why="a network"
)
HOW: dict[str, How] = {
    "make setup": Make(says=""),
    "make test": Make(says="-m pytest"),
    "make demo": Make(says="areal_lora.launch"),
    'make demo ARGS="run.steps=120"': Make(says="run.steps=120"),
    "make demo ARGS=--explain-resume": Make(says="--explain-resume"),
    "make demo ARGS=--fresh": Make(says="--fresh"),
    f"python -m areal_lora.launch --config {MOE} --dry-run run.root=/shared/runs cluster.slurm.partition=gpu"
    " cluster.slurm.gres_type=h100": Run(says="Batch script"),
    "python -m areal_lora.launch --config base.yaml --config overlay.yaml run.seed=2 adapters.0.rank=4": PLAN,
    f".venv/bin/python -m areal_lora.launch {CONFIGS}": PLAN,
    ".venv/bin/python -m areal_lora.launch --config examples/math/three_adapters.yaml": PLAN,
    ".venv/bin/python -m areal_lora.launch --config ... --config ... run.name=second run.seed=2 adapters.0.rank=4": Run(
        instead=(("--config ... --config ...", CONFIGS),), more="--dry-run", says="nothing is started"
    ),
    f"python -m areal_lora.launch {CONFIGS} --config examples/workflows/second_try.yaml": PLAN,
    **{
        f"python -m areal_lora.launch ... --config examples/workflows/{kind}.yaml": Run(
            instead=(("...", CONFIGS),), more="--dry-run", says="nothing is started"
        )
        for kind in ("gym", "mcp", "openenv", "verifiers")
    },
    f"areal-lora sweep {MOE} {EMBEDDED} 'adapters.0.optimizer.lr=[1e-4,3e-4]' 'adapters.0.rank=[4,8]'": Run(
        more="--dry-run", says="rungs: step 8 keeps 2, step 15 keeps 1"
    ),
    f"python -m areal_lora.launch {CONFIGS} --config examples/math/gspo.yaml run.steps=10": PLAN,
    f"python -m areal_lora.launch {CONFIGS} --config examples/math/opo.yaml run.steps=20 run.seed=2"
    " run.name=opo-2": PLAN,
    "python benchmarks/algorithm_curves.py runs/opo-2": Run(
        instead=(("runs/opo-2", "runs/NAME"),), says="| `grpo` | 7 |"
    ),
    f"python -m areal_lora.launch {CONFIGS} --config examples/math/embedded_long.yaml run.seed=2"
    " adapters.0.optimizer.lr=1.0e-3 adapters.0.task.n_eval=512 eval.every_steps=20": PLAN,
    "python -m areal_lora.launch ... --explain-resume": Run(instead=(("...", CONFIGS),), says="holds no run"),
    "python -m areal_lora.launch ... --fresh": Run(instead=(("...", CONFIGS),), more="--dry-run"),
    ".venv/bin/python -m areal_lora init mine.yaml --model MODEL --data DATA --prompt question --answer answer"
    " --reward numeric_match": Run(instead=(("DATA", "data.jsonl"),)),
    ".venv/bin/python -m areal_lora train --config mine.yaml": PLAN,
    "areal-lora status RUN --groups": Run(says="groups of"),
    "areal-lora samples RUN --worst": Run(says="== "),
    "areal-lora status second": Run(live=True),
    "areal-lora resume second": Run(live=True, code=64, says="is still going"),
    "areal-lora stop second": Run(live=True, says="Stopped."),
    "areal-lora add-servers RUN --servers 2": NO_RUN,
    "areal-lora add-servers RUN --nodes 3 --servers 8 --time 04:00:00 --partition idle": NO_RUN,
    "areal-lora add-servers RUN --here": NO_RUN,
    'for RANK in 0 1 2; do ssh node$RANK "cd $PWD && AREAL_LORA_NODE_RANK=$RANK areal-lora train --config FILE" & done;'
    " wait": Elsewhere(
        test="tests/e2e/test_nodes_run.py::test_a_run_on_three_nodes_survives_its_agents_and_stops_with_one_code",
        why="several machines",
    ),
    "areal-lora serve-remote URL --token-file remote.token": Elsewhere(
        test="tests/process/engine/vllm_ext/test_remote.py::"
        "test_a_remote_vllm_scores_and_samples_published_versions_like_hugging_face",
        why="a run with a gateway",
    ),
    "areal-lora remove-servers RUN": Run(says="no spare servers"),
    "areal-lora page runs/NAME": Elsewhere(
        test="tests/process/obs/test_page_browser.py::test_a_live_page_follows_the_run", why="a browser"
    ),
    "areal-lora report runs/NAME": Run(says="report.html"),
    **dict.fromkeys(
        ["areal-lora track runs/NAME --wandb my-project", "areal-lora track runs/NAME --mlflow http://127.0.0.1:5000"],
        Elsewhere(
            test="tests/process/cli/test_track.py::"
            "test_a_finished_run_has_the_curves_of_tensorboard_its_configuration_and_its_end",
            why="packages of the trackers",
        ),
    ),
    ".venv/bin/python -m areal_lora.launch --config examples/math/service.yaml --serve": PLAN,
    **dict.fromkeys(
        [
            'python -m tinker_cookbook.recipes.chat_sl.train model_name="$PWD/Qwen/Qwen3-8B-Base"'
            " renderer_name=role_colon lora_rank=8 dataset=chats.jsonl batch_size=2 num_epochs=2 learning_rate=4e-3",
            "python -m tinker_cookbook.recipes.math_rl.train model_name=Qwen/Qwen3-8B-Base lora_rank=8"
            " groups_per_batch=4 max_steps=2",
            "python -m tinker_cookbook.recipes.rl_loop model_name=Qwen/Qwen3-8B-Base lora_rank=8 batch_size=2"
            " group_size=4 max_tokens=16",
        ],
        Elsewhere(test="tests/e2e/test_tinker_run.py::test_recipes_of_the_cookbook", why="a run with a service"),
    ),
    "tinker checkpoint download tinker://sd02fea56da93:train:0/weights/first": Elsewhere(
        test="tests/e2e/test_tinker_run.py::test_weights_are_taken_home_while_every_place_is_taken", why="a saved state"
    ),
    "python first.py": Elsewhere(test="tests/e2e/test_tinker_run.py::test_the_page", why="the program above it"),
    **dict.fromkeys(
        [
            "areal-lora adapters create service examples/math/adapters/sums.yaml",
            "areal-lora adapters list service",
            "areal-lora adapters logs service sums",
            "areal-lora adapters download service sums sums.tar",
            "areal-lora adapters delete service sums",
            "areal-lora adapters keys service acme",
            "areal-lora stop service",
        ],
        Elsewhere(
            test="tests/e2e/test_service_run.py::test_the_page_from_the_first_adapter_to_the_stop",
            why="a run with a service, in order",
        ),
    ),
    "tail -f runs/NAME/metrics.jsonl": Run(more="| head -n 1", says='"kind":"step"'),
    **dict.fromkeys(
        [
            "python make_data.py",
            "areal-lora init mine.yaml --model examples/math/tiny_model --data train.parquet --prompt problem"
            " --answer solution --reward reward.py:reward --chat",
            "areal-lora train --config mine.yaml --config more.yaml",
            "areal-lora report mine",
            "areal-lora eval mine --version newest",
        ],
        Elsewhere(
            test="tests/e2e/test_own_task.py::test_the_page_trains_in_two_commands",
            why="the files of the page, in order",
        ),
    ),
    **dict.fromkeys(
        [
            "docker build -f containers/trainer.Dockerfile -t areal-lora-trainer .",
            "docker build -f containers/rollout.Dockerfile -t areal-lora-rollout .",
            "apptainer build --fakeroot trainer.sif containers/trainer.def",
            "apptainer build --fakeroot rollout.sif containers/rollout.def",
        ],
        Unseen(why="a container engine"),
    ),
    "requirements/lock.sh": Elsewhere(
        test="tests/repository/test_requirements.py::test_the_pins_can_be_made_again",
        why="a package index, for minutes",
    ),
    "areal-lora doctor": Elsewhere(
        test="tests/process/doctor/test_planted.py::test_a_healthy_machine_passes_and_nothing_remains",
        why="a real server; --quick is run here",
    ),
    "areal-lora merge RUN merged": Elsewhere(
        test="tests/unit/cli/test_export_merge.py::test_a_run_and_its_export_merge_alike", why="a run with checkpoints"
    ),
    "areal-lora push RUN org/name --dry-run": Elsewhere(
        test="tests/unit/cli/test_export_push.py::test_a_dry_run_lists_the_files", why="a run with checkpoints"
    ),
    ".venv/bin/python -m areal_lora chat runs/embedded": Elsewhere(
        test=f"{E2E}::test_the_printed_chat_command_talks_to_the_last_version", why="a real server"
    ),
    ".venv/bin/python -m areal_lora serve runs/embedded": Elsewhere(
        test=f"{E2E}::test_the_quickstart_shows_the_commands_that_a_run_prints", why="a real server"
    ),
    "areal-lora conversations runs/embedded --tokens": Elsewhere(
        test="tests/e2e/test_environments_run.py::test_the_sdk_calls_tools_and_two_steps_are_trained",
        why="a run with agents",
    ),
    ".venv/bin/python examples/math/evaluate.py runs/embedded": Elsewhere(
        test=f"{E2E}::test_the_printed_evaluation_agrees_with_the_run", why="a trained adapter"
    ),
    ".venv/bin/python -m tensorboard.main --logdir runs/embedded/tensorboard": Elsewhere(
        test=f"{E2E}::test_the_quickstart_shows_the_commands_that_a_run_prints", why="the curves of a run"
    ),
    ".venv/bin/python -m tensorboard.main --logdir runs/NAME/tensorboard": Elsewhere(
        test=f"{E2E}::test_the_quickstart_shows_the_commands_that_a_run_prints", why="the curves of a run"
    ),
    'curl --cacert runs/NAME/ca.pem -H "Authorization: Bearer $(cat runs/NAME/data.key)" https://HOST:PORT/v1/models': (
        Elsewhere(
            test="tests/unit/engine/vllm_ext/server/test_guards.py::test_outside_clients_do_as_the_documentation_says",
            why="a data plane with TLS",
        )
    ),
    "iptables -A INPUT -i lo -j ACCEPT": FIREWALL,
    "iptables -A INPUT -p tcp --dport 1024:65535 -m conntrack --ctstate NEW -i ib0 ! -s 10.4.0.0/24 -j DROP": FIREWALL,
    "iptables -A INPUT -p tcp --dport 1024:65535 -m conntrack --ctstate NEW ! -i ib0 -d 10.4.0.0/24 -j DROP": FIREWALL,
}
SHOWN = {command.text: command for page in PAGES for command in commands(page)}


def test_every_command_of_the_pages_is_known() -> None:
    assert len(SHOWN) > 30, "the search for commands finds nothing any more"
    assert set(SHOWN) == set(HOW)
    unnamed = [f"{b.page}:{b.line}" for page in PAGES for b in blocks(page) if b.language not in LANGUAGES]
    assert unnamed == [], "blocks without a language"


def test_names_of_the_package_that_the_pages_import_exist() -> None:
    shown = "".join(b.text for page in PAGES for b in blocks(page) if b.language == "python")
    imports = re.findall(r"^from (areal_lora[\w.]*) import (.+)$", shown, re.MULTILINE)
    names = {f"{module}:{name}" for module, listed in imports for name in listed.split(", ")}
    assert len(names) > 5, "the search for imports finds nothing any more"
    for name in sorted(names):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("how", [how for how in HOW.values() if isinstance(how, Elsewhere)], ids=lambda how: how.test)
def test_commands_that_other_tests_run_have_that_test(how: Elsewhere) -> None:
    path, _, function = how.test.partition("::")
    assert function in {n.name for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.FunctionDef)}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout, with runs named as the pages name them."""
    folder = tmp_path_factory.mktemp("a checkout")
    programs(folder / ".venv" / "bin")
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "MODEL").symlink_to(TINY_MODEL)
    rows = (json.dumps({"question": f"{n}?", "answer": f"#### {n}"}) for n in range(20))
    (folder / "data.jsonl").write_text("\n".join(rows))
    shutil.copy(ROOT / MOE, folder / "base.yaml")
    shutil.copy(ROOT / EMBEDDED, folder / "overlay.yaml")
    (folder / "tiny_model").symlink_to(TINY_MODEL)  # paths in a file are looked up next to it
    run = make_run(folder / "runs" / "NAME")
    shutil.copytree(run, folder / "runs" / "RUN")
    return folder


@pytest.fixture(scope="module")
def live(checkout: Path) -> Iterator[Path]:
    """The checkout, with the run ``second``, which works and has some steps and a checkpoint."""
    with held(checkout / "runs", "second") as run:
        (run / "checkpoints" / "gsm8k" / "v000040").mkdir(parents=True)
        recorded = (checkout / "runs" / "NAME" / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(recorded.replace('"adapter":"toy"', '"adapter":"gsm8k"'))
        yield checkout


@contextmanager
def held(root: Path, name: str) -> Iterator[Path]:
    command = [forked_python(), "-m", held_run.__name__, str(root), name, "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: held_run.all_up(root / name))
            yield root / name
        finally:
            process.kill()


def shell(command: str, folder: Path, timeout_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_CACHE": str(folder / "no hub cache"),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def done(command: str, how: Run, folder: Path) -> str:
    for old, new in how.instead:
        assert old in command
        command = command.replace(old, new, 1)
    result = shell(f"{command} {how.more}", folder)
    assert result.returncode == how.code, result.stdout
    assert how.says in result.stdout, result.stdout
    return result.stdout


PRINTED = [text for text, how in HOW.items() if isinstance(how, Run) and not how.live]


@pytest.mark.parametrize("text", sample(PRINTED, 0, lambda text: [HOW[text] if HOW[text] in (PLAN, NO_RUN) else text]))
def test_it_works_as_printed(text: str, checkout: Path) -> None:
    how = HOW[text]
    assert isinstance(how, Run)
    output = done(text, how, checkout)
    assert unbroken(SHOWN[text].output) in unbroken(output)


def unbroken(text: str) -> str:
    """``text`` without the spaces that fill lines of a table's title."""
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_the_script_that_is_shown_is_that_of_the_plan(checkout: Path) -> None:
    page = ROOT / "docs" / "en" / "cluster.md"
    [script] = [block.text for block in blocks(page) if block.text.startswith("#!")]
    [command] = [command for command in commands(page) if "--dry-run" in command.text]
    assert script in shell(command.text, checkout).stdout


def test_a_working_run_is_shown_refused_and_stopped_as_printed(live: Path) -> None:
    shown = [command for command in SHOWN.values() if isinstance(how := HOW[command.text], Run) and how.live]
    for command in shown:  # in the order of the page
        how = HOW[command.text]
        assert isinstance(how, Run)
        output = done(command.text, how, live)
        alike = labels if "status" in command.text else shape
        assert alike(output.replace(str(live), "/repo")) == alike(command.output)


def labels(output: str) -> list[str]:
    """The first word of each line."""
    return [line.split(" ")[0] for line in output.splitlines()]


def shape(output: str) -> list[str]:
    """``output`` without numbers, which differ from run to run, and quotes of a path with a space."""
    return [re.sub(r"\d+", "0", line.replace("'", "")) for line in output.splitlines()]


def test_the_doctors_findings_are_those_that_are_shown(checkout: Path) -> None:
    [command] = [command for command in SHOWN.values() if command.text == "areal-lora doctor"]

    def findings(output: str) -> set[str]:
        return {line[6:20].strip() for line in output.splitlines() if line.startswith(("ok ", "note ", "fail "))}

    quick = findings(shell(f"{command.text} --quick", checkout).stdout)
    assert quick | {"network", "canary"} == findings(command.output) | {"network", "canary"}
    assert {"network", "canary"} <= findings(command.output)


@pytest.mark.parametrize("text", [text for text, how in HOW.items() if isinstance(how, Make)])
def test_what_make_starts(text: str, checkout: Path) -> None:
    how = HOW[text]
    assert isinstance(how, Make)
    # `make test ARGS=...` gives its variables to every make below it.
    result = shell(text.replace("make ", "env -u MAKEFLAGS -u ARGS make -n ", 1), ROOT)
    assert result.returncode == 0, result.stdout
    assert how.says in result.stdout
    for line in result.stdout.splitlines():
        if " -m areal_lora.launch " in line:
            more = "" if "--explain-resume" in line else " --dry-run"
            planned = shell(line + more, checkout)
            assert planned.returncode == 0, planned.stdout


def options() -> dict[str, set[str]]:
    """Options of every verb."""
    group = typer.main.get_command(build())
    assert isinstance(group, typer.core.TyperGroup)
    context = group.make_context("areal-lora", [], resilient_parsing=True)
    return {name: options_of(group.resolve_command(context, [name])[1]) for name in group.commands}


def options_of(command: typer.core.TyperGroup | object) -> set[str]:
    """Of a verb, or of all verbs in a group."""
    own = {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")}  # type: ignore[attr-defined]
    inner = command.commands.values() if isinstance(command, typer.core.TyperGroup) else ()
    return own.union({"--help"}, *map(options_of, inner))


def test_verbs_and_options_in_the_text_exist() -> None:
    known = options()
    found = [text for page in PAGES for text in inline(page) if re.match(r"(\.venv/bin/)?areal-lora \w", text)]
    assert len(found) > 40
    for text in found:
        _, verb, *words = text.replace("[", " ").replace("]", " ").split()
        assert verb in known, text
        assert {word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)} <= known[verb], text


def test_options_in_the_table_of_commands_are_those_of_their_verb() -> None:
    known = options()
    rows = [
        line
        for line in (ROOT / "docs" / "en" / "running.md").read_text().splitlines()
        if line.startswith("| `areal-lora ")
    ]
    assert len(rows) > 12
    for row in rows:
        verbs = set(re.findall(r"`areal-lora ([\w-]+)", row))
        named = set(re.findall(r"`(--?[a-z][a-z-]*)", row))
        assert named <= set().union(*(known[verb] for verb in verbs)), row
    assert {verb for row in rows for verb in re.findall(r"`areal-lora ([\w-]+)", row)} >= set(known) - {
        "add-servers",
        "remove-servers",
    }
