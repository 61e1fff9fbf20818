"""The command line: quick to start, one line for every failure, exit codes as documented."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from areal_lora.cli import app
from areal_lora.errors import EnvironmentError_, ExitCode
from areal_lora.run_folder import paths as atomic
from tests.support.cli.command import areal_lora
from tests.support.obs.fake_run import make_run
from tests.support.obs.three_adapters import make_three
from tests.support.paths import ROOT

START_S = 0.5  # of a core
INIT = [
    "--model",
    "org/name",
    "--data",
    "org/rows",
    "--prompt",
    "p",
    "--answer",
    "a",
    "--reward",
    "numeric_match",
    "--device",
    "cpu",
]


def test_help_names_every_verb_and_loads_nothing_heavy() -> None:
    heavy = ("torch", "vllm", "megatron", "transformers", "numpy", "pydantic")
    code = f"import sys, areal_lora.cli.app as a; a.build(); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "[]\n", done.stderr
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = areal_lora("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    assert all(f"\n  {verb} " in done.stdout for verb in app.VERBS)
    assert min(times) < START_S


def test_the_console_script_is_this_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"areal-lora": "areal_lora.cli.app:main"}
    assert "\ntyper==" in (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8")


def test_the_module_prints_completion_that_bash_reads() -> None:
    show = f"{shlex.quote(sys.executable)} -m areal_lora --show-completion; true"
    done = subprocess.run(["bash", "-c", show], cwd=ROOT, capture_output=True, text=True, check=True, timeout=150)
    assert "complete -o default -F _areal_lora_completion areal-lora" in done.stdout
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("sta", ["status"]), ("status mi", ["mine"]), ("add-s", ["add-servers"]), ("status --js", ["--json"])],
)
def test_bash_completes_verbs_runs_and_options(tmp_path: Path, typed: str, offered: list[str]) -> None:
    """By the function that the printed script defines, as bash calls it."""
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    words = ["areal-lora", *typed.split()]
    ask = f"""
        eval "$(areal-lora --show-completion)"
        function=$(complete -p areal-lora | sed -E 's/.* -F ([^ ]+) .*/\\1/')
        COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
        $function areal-lora "${{COMP_WORDS[COMP_CWORD]}}" x
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", ask], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=150
    )
    assert done.stdout.split() == offered, done.stderr


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["statsu", "x"], ["No such command 'statsu'", "status"]),
        (["status"], ["Missing argument"]),
        (["status", "--jsn", "x"], ["--jsn"]),
        (["logs", "x", "-n", "many"], ["-n", "valid integer"]),
        (["status", "no-such-run"], ["no-such-run: there is no such run", "runs"]),
        (["status", "pyproject.toml"], ["pyproject.toml", "it is a file"]),
        (["stop", "docs"], ["docs", "no config.json"]),
        (["status", "~no-such-user/x"], ["~no-such-user/x: there is no such run"]),
        (["init", "no-folder/x.yaml", *INIT], ["no-folder/x.yaml: No such file or directory (fix: correct this path)"]),
        (["plan"], ["nothing was given", "name one run"]),
        (["plan", "--config", "nowhere.yaml"], ["nowhere.yaml", "no such configuration file"]),
        (["plan", "--config", "examples/math/embedded.yaml", "foo"], ["foo: is not an override", "dotted.key"]),
        (["plan", "--config", "examples/math/embedded.yaml", "docs"], ["was given", "name one run"]),
    ],
)
def test_a_failure_is_one_line(
    words: list[str], texts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert app.main(words) == 64
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert err.startswith("error: ")
    assert all(text in err for text in texts), err


def test_a_full_disk_names_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "x", steps=2)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write does: without a name

    monkeypatch.setattr(atomic, "replacing", full)
    assert app.main(["report", str(tmp_path / "x")]) == 74
    assert capsys.readouterr().err.startswith(
        f"error: {tmp_path / 'x' / 'report.html'}: No space left on device (fix: "
    )


VERBS_OF_A_RUN = ("status", "logs", "stop", "resume", "plan", "report")


def broken(folder: Path, how: str) -> tuple[Path, str]:
    """A run folder that is broken in one way, and a part of the line that it gets."""
    make_run(folder, steps=2)
    config = folder / "config.json"
    if how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
        return folder, "it is empty: no run started in it"
    if how == "half-written":
        config.write_text(config.read_text()[:200])
        return folder, f"{config}: it is not JSON"
    config.write_text(config.read_text().replace('"alpha"', '"alhpa"'))
    return folder, f"{config}: this version cannot read it"


@pytest.mark.parametrize("how", ["empty", "half-written", "old"])
def test_a_broken_run_folder_is_one_line_for_every_verb(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = broken(tmp_path / "a run", how)
    for verb in VERBS_OF_A_RUN:
        if verb == "logs" and how != "empty":
            continue  # reads no configuration
        assert app.main([verb, str(folder)]) == 64, verb
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), (verb, err)
        assert text in err, (verb, err)


def test_a_read_only_run_folder_can_be_looked_at_and_refuses_a_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", steps=3)
    command = f'mount --bind "{folder}" "{folder}" && mount -o remount,bind,ro "{folder}" && exec "$@"'
    inside = ["unshare", "-m", "bash", "-c", command, "-", sys.executable, "-m", "areal_lora"]
    if subprocess.run([*inside[:6], "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounts need privileges")
    done = subprocess.run([*inside, "status", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step        3/40" in done.stdout
    done = subprocess.run([*inside, "report", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (74, 1), done.stderr
    assert "Read-only file system" in done.stderr


@pytest.mark.parametrize(
    "words",
    [["chat"], ["serve"], ["eval"], ["export", "out"], ["merge", "out"], ["push", "org/name"]],
    ids=lambda w: w[0],
)
def test_a_verb_for_one_adapter_refuses_to_choose_among_several(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_three(tmp_path / "x")
    verb, *rest = words
    assert app.main([verb, str(folder), *rest]) == ExitCode.WRONG_INPUT
    assert "the run has several: alpha, beta, gamma (fix: name one of them)" in capsys.readouterr().err
    assert app.main([verb, str(folder), *rest, "--adapter", "delta"]) == ExitCode.WRONG_INPUT
    assert "no adapter 'delta'" in capsys.readouterr().err


def test_a_text_beyond_the_encoding_is_escaped(tmp_path: Path) -> None:
    log = make_run(tmp_path / "x", steps=1) / "logs" / "server-9.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("5 \u20ac\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "areal_lora", "logs", str(tmp_path / "x"), "server-9"],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "5 \\u20ac\n"), done.stderr


@pytest.mark.parametrize("port", ["taken", "65536"])
def test_a_page_on_a_port_that_it_cannot_have_is_one_line(
    tmp_path: Path, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "x", steps=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1]) if port == "taken" else port
        assert app.main(["page", str(folder), "--port", number]) == ExitCode.WRONG_INPUT
    err = capsys.readouterr().err
    assert (err.count("\n"), "--port" in err) == (1, True), err


@pytest.mark.parametrize("verb", [["schema"], ["init", "--help"]])
def test_a_closed_pipe_is_no_error(verb: list[str]) -> None:
    """Of a reader that ends first: more than a pipe holds, and a few lines."""
    receiver, sender = os.pipe()
    os.close(receiver)
    code = f"import sys; from areal_lora.cli.app import main; sys.exit(main({verb!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=sender, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(sender)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_connection_that_a_service_closes_is_an_error() -> None:
    """Beside a pipe as output that is read."""
    code = (
        "import socket, sys, types\n"
        "from areal_lora.cli import app\n"
        "def verb() -> None:\n"
        "    ours, theirs = socket.socketpair()\n"
        "    theirs.close()\n"
        "    print('a line', flush=True)\n"
        "    ours.send(b'x')\n"
        "sys.modules['areal_lora.cli.closed'] = types.SimpleNamespace(verb=verb)\n"
        "app.VERBS['status'] = ('closed.verb', '')\n"
        "sys.exit(app.main(['status']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (EnvironmentError_.exit_code, "a line\n")
    assert (done.stderr.count("\n"), done.stderr[:19]) == (1, "error: Broken pipe:"), done.stderr
