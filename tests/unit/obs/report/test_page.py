"""The report is one self-contained file that shows the figures of the run and runs its own scripts alone."""

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from areal_lora.obs.metrics.records import EvalRecord, MembersRecord, PublishRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.page import SCRIPTS, write_report
from areal_lora.run_folder.events import EndEvent, write_event
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import set_status
from tests.support.obs.fake_run import ADAPTER, make_config, make_run
from tests.support.obs.page import Page
from tests.support.obs.records import step_record
from tests.support.obs.rollouts import keep, step_rollouts


def test_the_report_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    page = Page(html)
    assert page.tags.count("figure") == len(page.titles()) >= 20
    assert page.tags.count("script") == 1 + len(SCRIPTS)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[0] in ("src", "href") or a[0].startswith("on")]
    policy = next(value for name, value in page.attributes if name == "content" and value and "default-src" in value)
    for text in page.scripts[1:]:
        assert f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy
    for shown in (
        "0.250 → 0.850",
        "Staleness",
        "Parity probe",
        "re-issued",
        "late duplicates",
        "stale 5, timeout 1",
        "3.0 MiB",
        "was killed by signal 9",
        "Resumed from a checkpoint",
    ):
        assert shown in page.text, shown
    lines = {line.name for chart in page.data.sections[0].charts for line in chart.lines}
    assert {"commit_wait", "mismatch_fresh", "staleness"} <= lines
    assert '"world_size": 2' in page.text
    assert "nothing recorded" not in page.text


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    make_run(tmp_path, steps=2)
    attack = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>"
    keep(RunFolder(tmp_path), [step_rollouts(2, texts=[attack] * 8)])
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "img" not in page.tags
    assert page.tags.count("script") == 1 + len(SCRIPTS)
    assert attack not in page.text
    assert {one.head.answer for one in page.data.rollouts[0].groups[-1].rollouts} == {attack}


def test_names_cannot_end_the_script_that_holds_the_data(tmp_path: Path) -> None:
    make_run(tmp_path, steps=2)
    attack = "</script><script>alert(1)</script>"
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(step_record(step=2, version=2, time_s=9.0, adapter=ADAPTER, metrics={f"reward/{attack}": 1.0}))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.tags.count("script") == 1 + len(SCRIPTS)
    [chart] = [c for c in page.data.sections[0].charts if c.title == "Reward by part"]
    assert attack in [line.name for line in chart.lines]


def test_a_run_that_has_not_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(make_config().model_dump_json())
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Nothing recorded." in page.text
    assert page.data.rollouts[0].kept == 0


def test_the_first_and_the_last_group_are_inside(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path, steps=26)).read_text(encoding="utf-8"))
    [rollouts] = page.data.rollouts
    assert (rollouts.run, rollouts.kept, rollouts.steps) == (tmp_path.name, 6 * 8, (0, 25))
    assert [(g.rollouts[0].head.step, len(g.rollouts)) for g in rollouts.groups] == [(0, 4), (25, 4)]


def test_without_a_rule_for_what_is_correct_rewards_are_shown_and_no_accuracy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(make_config().model_dump_json())
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for version, reward in ((0, -0.25), (20, 0.125)):
            figures = {"accuracy": None, "reward_mean": reward, "n": 64, "unscored": 3}
            writer.write(EvalRecord(version=version, step=version, **figures))
    html = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(html)
    for shown in ("-0.250 → 0.125held-out mean reward", "3 of 64"):
        assert shown in page.text, shown
    drawn = {chart.title: chart.lines for chart in page.data.sections[0].charts}
    assert [(line.x, line.y) for line in drawn["Held-out reward"]] == [([0.0, 20.0], [-0.25, 0.125])]
    assert "Held-out accuracy" not in drawn
    assert "greedy accuracy" not in page.text


def test_each_set_of_an_evaluation_has_its_line_and_its_row(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(make_config().model_dump_json())
    several = {"n": 8, "n_samples": 4, "temperature": 0.8, "pass_at": {1: 0.25, 4: 0.75}, "majority": 0.375}
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        for version, accuracy in ((0, 0.125), (20, 0.5)):
            writer.write(EvalRecord(version=version, step=version, accuracy=accuracy, n=64, name="easy"))
            sampled = EvalRecord(version=version, step=version, accuracy=0.25, name="hard", order=1, **several)
            writer.write(msgspec.structs.replace(sampled, accuracy_95=(0.1, 0.4), interval="bootstrap", truncated=0.5))
    html = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(html)
    assert "0.125 → 0.500held-out greedy accuracy" in page.text, "the first set decides"
    table = html.partition("Evaluations, the last of each set")[2].partition("</table>")[0]
    heads, _, hard = (re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table))
    row = dict(zip(heads, hard, strict=True))
    shown = {"set": "hard", "version": "v20", "problems x answers": "8 x 4", "temperature": "0.8"}
    assert row | shown | {"accuracy": "0.250", "pass@4": "0.750", "majority": "0.375", "truncated": "0.500"} == row
    assert row["accuracy, 95 %"] == "0.100 to 0.400 (bootstrap)"
    lines = {line.name for chart in page.data.sections[0].charts for line in chart.lines}
    assert {"hard/pass@4", "hard/majority", "easy", "hard"} <= lines


@pytest.mark.parametrize("prefix", ["", "03:43:48.123 controller-0 INFO tasks.reward_calls:     "])
def test_the_newest_traceback_is_shown(prefix: str, tmp_path: Path) -> None:
    """Of a worker, which prints it, and of a scorer, which the controller logs."""
    make_run(tmp_path, steps=2)
    log = RunFolder(tmp_path).log("controller-0")
    log.parent.mkdir(exist_ok=True)
    head = "Traceback (most recent call last):"
    old, new = (
        [head, '  File "a.py", line 1', "KeyError: 1"],
        [head, '  File "b.py", line 2', "    x", "ValueError: <no>"],
    )
    log.write_text(
        "\n".join(["03:43:48.120 controller-0 INFO a.b: ok", *(prefix + line for line in (*old, *new)), "03:43"])
    )
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.text.count("ValueError: <no>") == 2, "as a line, and below it"
    assert 'File "b.py", line 2' in page.text
    assert "KeyError" not in page.text
    log.write_text("ok")
    assert "traceback" not in Page(write_report(tmp_path).read_text(encoding="utf-8")).text


def test_a_run_in_progress_says_what_it_does_now_and_what_is_wrong(tmp_path: Path) -> None:
    make_run(tmp_path, steps=2)
    folder = RunFolder(tmp_path)
    set_status(folder, "trainer", 0, "training <step 3>")
    for index in range(2):
        set_status(folder, "server", index, "serving")
    with MetricsWriter(folder) as writer:
        faults = {"retried": {"scorer": 1}, "faults": {"scorer": "TypeError: <b>no</b>"}}
        writer.write(step_record(step=2, version=2, time_s=6.0, adapter=ADAPTER, **faults))
        writer.write(
            PublishRecord(
                version=2, total_ms=9.0, adapter=ADAPTER, servers=3, probe_mean_abs=3e-7, lost={"server-1": "<late>"}
            )
        )
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    for shown in (
        "training <step 3>",
        "served by 3 servers, fingerprints equal",
        "v2",
        "the servers still score like the base model",
    ):
        assert shown in page.text, shown
    assert page.text.count("TypeError: <b>no</b>") == 2, "as a problem, and in the table"
    for row in ("server-0servingv2", "server-1servingexcluded: <late>"):
        assert row in page.text
    with MetricsWriter(folder) as writer:
        writer.write(MembersRecord(version=2, servers=3, joined=["server-1"]))
    joined = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "server-1servingv2" in joined.text
    write_event(folder, EndEvent(at="2026-01-01T00:00:00Z", process="trainer-0", code=70, how="exited with code 70"))
    ended = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Ended with exit code 70" in ended.text
    assert "training <step 3>" not in ended.text
