"""The report is one self-contained file that shows the figures of the run and runs nothing."""

import re
from pathlib import Path

import msgspec

from areal_lora.obs.metrics.records import EvalRecord, RolloutSampleRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.page import write_report
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.fake_run import make_config, make_run
from tests.support.obs.page import Page


def test_the_report_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    page = Page(html)
    assert page.tags.count("svg") >= 20
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[0] in ("src", "href") or a[0].startswith("on")]
    assert "url(" not in html
    assert "@import" not in html
    for shown in (
        "0.250 → 0.850",
        "Staleness",
        "commit_wait",
        "Parity probe",
        "Early",
        "Late",
        "mismatch_fresh",
        "re-issued",
        "late duplicates",
        "stale 5, timeout 1",
        "3.0 MiB",
        "was killed by signal 9",
        "Resumed from a checkpoint",
    ):
        assert shown in page.text, shown
    assert '"world_size": 2' in page.text
    assert "nothing recorded" not in page.text


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    make_run(tmp_path, steps=2)
    attack = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>"
    with MetricsWriter(RunFolder(tmp_path)) as writer:
        writer.write(RolloutSampleRecord(step=0, prompt=attack, completion=attack, reward=0.0, gold=attack))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(attack) == 3


def test_a_run_that_has_not_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(make_config().model_dump_json())
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Nothing recorded." in page.text
    assert "None recorded." in page.text


def test_every_sample_is_shown_at_most_once(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path, steps=26)).read_text(encoding="utf-8")  # 6 samples
    assert [int(n) for n in re.findall(r"<span>step (\d+)</span>", html)] == [0, 5, 10, 15, 20, 25]


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
    figures = dict(re.findall(r"<figcaption>(.*?) <small>.*?</figcaption>(<svg.*?</svg>)", html, flags=re.S))
    assert "<polyline" in figures["Held-out reward"]
    assert "Held-out accuracy" not in figures
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
    for line in ("hard/pass@4", "hard/majority", "easy"):
        assert line in page.text, line
