"""How an object reaches the processes of a run: by the path of its module's file, its package, or a saved file."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.sections.task import FunctionReward
from areal_lora.errors import ConfigError
from areal_lora.library.objects import given_sections, user_code
from areal_lora.tasks.word_problems import draw_problem
from tests.support.paths import EXAMPLES

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module and a package that only this process finds."""
    (tmp_path / "own_rewards.py").write_text("def reward(completion, answer):\n    return 0.5\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    (tmp_path / "own_package" / "half.py").write_text("HALF = 0.5\n")
    text = "from .half import HALF\n\ndef reward(completion, answer):\n    return HALF\n"
    (tmp_path / "own_package" / "rewards.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def called_elsewhere(path: str, folder: Path) -> Any:
    """What the reward at ``path`` returns in a process that has neither this working folder nor this path."""
    code = (
        "import json; from areal_lora.processes.loading import load_import_path; "
        f"print(json.dumps(load_import_path({path!r})('', '')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", ["own_rewards", "own_package.rewards"])
def test_an_object_of_a_module_is_imported_where_the_module_is_unknown(
    modules: Path, tmp_path: Path, module: str
) -> None:
    away = tmp_path / "away"
    away.mkdir()
    reward = importlib.import_module(module).reward
    try:
        code = user_code(load_config(FILES), {"reward": reward})
        code.write(away)
        found = code.put_into(load_config(FILES), away).adapters[0].reward
        assert isinstance(found, FunctionReward)
        assert called_elsewhere(found.path, away) == 0.5
        assert ("own_rewards.py" in found.path) == (not code.files), "a file that is there is not copied"
    finally:
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]


SCRIPT = """
import sys
from pathlib import Path

from {module} import stated
from areal_lora.library.objects import UserCode, _travel

def {what}(completion, answer):
    return stated(completion)

path, text = _travel({what!r}, {what})
code = UserCode(paths={{}}, files={{path.partition(":")[0]: text}})
code.write(Path(sys.argv[1]))
print(path)
"""


@pytest.mark.parametrize("what", ["reward", "environment"])
@pytest.mark.parametrize("package", ["", "experiments", "experiments.first"])
def test_a_script_beside_a_module_with_the_name_of_the_argument(what: str, package: str, tmp_path: Path) -> None:
    """`reward.py` with helpers is what many have; a script of a package imports its neighbours by the package."""
    code, place, away = tmp_path / "code", tmp_path.joinpath(*package.split(".")), tmp_path / "away"
    for folder in (code, place, away):
        folder.mkdir(parents=True, exist_ok=True)
    (place / f"{what}.py").write_text("def stated(text):\n    return 0.25\n")
    (place / "script.py").write_text(SCRIPT.format(what=what, module=f".{what}" if package else what))
    argv = ["-m", f"{package}.script"] if package else [str(place / "script.py")]
    done = subprocess.run([sys.executable, *argv, str(code)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path = f"{code / done.stdout.strip()}"
    assert called_elsewhere(path, away) == 0.25
    load = f"from areal_lora.rollout.environment_kinds import load; print(load({path!r})('', ''))"
    done = subprocess.run([sys.executable, "-c", load], cwd=away, capture_output=True, text=True, check=False)
    assert done.stdout == "0.25\n", done.stderr


def test_an_object_of_an_installed_package_keeps_its_name() -> None:
    config = load_config(FILES)
    put = user_code(config, {"environment": json.JSONDecoder, "reward": json.dumps}).put_into(config, Path("/x"))
    workflow = put.adapters[0].workflow.model_dump()
    assert (workflow["kind"], workflow["env"], workflow["path"]) == ("multi_turn", "json.decoder:JSONDecoder", None)
    assert user_code(config, {"agent": draw_problem}).files.keys() == {"areal_lora_agent.py"}


def test_what_is_configured_besides_remains() -> None:
    given = {"adapters": [{"name": "gsm8k", "reward": {"kind": "function", "path": "a.py:b", "network": True}}]}
    config = load_config([*FILES, given], ["adapters.gsm8k.reward.timeout_s=7"])
    reward = user_code(config, {"reward": json.dumps}).put_into(config, Path("/x")).adapters[0].reward
    assert reward.model_dump(include={"path", "network", "timeout_s"}) == {
        "path": "json:dumps",
        "network": True,
        "timeout_s": 7.0,
    }
    two = [{"kind": "numeric_match"}, {"kind": "none"}]
    config = load_config([*FILES, {"adapters": [{"name": "gsm8k", "reward": two, "reward_weights": [1, 2]}]}])
    adapter = user_code(config, {"reward": json.dumps}).put_into(config, Path("/x")).adapters[0]
    assert (adapter.reward.kind, adapter.reward_weights) == ("function", [])


def inner() -> Any:
    def reward(completion: str, answer: str) -> float:
        return 1.0

    return reward


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (functools.partial(json.dumps), "reward: a partial cannot be imported"),
        (3, "reward: a int cannot be imported"),
        (inner(), "is not a name of a module"),
    ],
)
def test_an_object_without_a_name_is_refused(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        user_code(load_config(FILES), {"reward": value})


def test_objective_advantage_and_reward_go_together() -> None:
    objects = {"loss": json.dumps, "advantage": json.loads, "reward": json.dump, "agent": json.load}
    [adapter] = user_code(load_config(FILES), objects).put_into(load_config(FILES), Path("/x")).adapters
    chosen = adapter.algorithm
    assert (chosen.loss, chosen.advantage, adapter.reward.path) == ("json:dumps", "json:loads", "json:dump")


def test_two_kinds_of_workflow_are_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        user_code(load_config(FILES), {"agent": json.dumps, "workflow": json.dumps})


@pytest.mark.parametrize(
    ("what", "section", "kept"),
    [
        ("reward", {"reward": {"kind": "function"}}, ("reward", "timeout_s", 5.0)),
        ("reward", {"reward": {"kind": "function", "timeout_s": 3}}, ("reward", "timeout_s", 3.0)),
        ("reward", {"reward": {"timeout_s": 3}}, ("reward", "timeout_s", 3.0)),
        ("environment", {"workflow": {"kind": "multi_turn", "max_turns": 2}}, ("workflow", "max_turns", 2)),
        ("environment", {"workflow": {"max_turns": 2}}, ("workflow", "max_turns", 2)),
        ("agent", {"workflow": {"kind": "agent", "tool_parser": "hermes"}}, ("workflow", "tool_parser", "hermes")),
        ("workflow", {"workflow": {"args": {"a": 1}}}, ("workflow", "args", {"a": 1})),
        ("loss", {"algorithm": {"kind": "tis"}}, ("algorithm", "behaviour_cap", 2.0)),
        ("advantage", {"algorithm": {"kl_coef": 0.1}}, ("algorithm", "kl_coef", 0.1)),
    ],
)
def test_the_section_of_an_object_needs_no_path_and_its_other_keys_remain(
    modules: Path, tmp_path: Path, what: str, section: dict[str, Any], kept: tuple[str, str, Any]
) -> None:
    objects = {what: importlib.import_module("own_rewards").reward}
    try:
        config = load_config([*FILES, {"adapters": [section]}], given=given_sections(objects))
        [adapter] = user_code(config, objects).put_into(config, tmp_path).adapters
    finally:
        sys.modules.pop("own_rewards")
    part, key, value = kept
    found = getattr(adapter, part).model_dump()
    assert found[key] == value
    assert str(modules / "own_rewards.py:reward") in found.values()
