"""Merging, overrides, path resolution and the one-line errors of areal_lora.config.load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from areal_lora.config.load import OWN_KEYS, load_config
from areal_lora.config.models import Config, WorkerWorkflowConfig
from areal_lora.config.sections.adapter import PRESETS
from areal_lora.config.sections.section import described
from areal_lora.config.sections.task import DatasetTask
from areal_lora.errors import ConfigError, ConfigErrors
from tests.support.paths import EXAMPLES

MOE = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"
DENSE = EXAMPLES / "gsm8k_grpo_megatron_lora_dense.yaml"
EMBEDDED = EXAMPLES / "embedded.yaml"
ALGORITHMS = [EXAMPLES / f"{kind}.yaml" for kind in (*PRESETS, "sft") if kind != "grpo"]
FSDP, LONG = EXAMPLES / "embedded_fsdp.yaml", EXAMPLES / "embedded_long.yaml"
ONE_GPU, THREE = EXAMPLES / "one_gpu.yaml", EXAMPLES / "three_adapters.yaml"
SERVICE = EXAMPLES / "service.yaml"
MERGED = EXAMPLES / "merged.yaml"
RECIPES = [EXAMPLES / f"gsm8k_grpo_megatron_lora_{name}.yaml" for name in ("72b", "moe_one_node")]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_every_shipped_file_is_used_here() -> None:
    plain = {MOE, DENSE, ONE_GPU, EMBEDDED, FSDP, LONG, THREE, MERGED, SERVICE}
    assert set(EXAMPLES.glob("*.yaml")) == {*plain, *RECIPES, *ALGORITHMS}


SHIPPED = [
    [MOE],
    [DENSE],
    [ONE_GPU],
    [MOE, EMBEDDED],
    [THREE],
    [SERVICE],
    [MOE, EMBEDDED, FSDP],
    [MOE, EMBEDDED, LONG],
    [MOE, EMBEDDED, MERGED],
    *([recipe] for recipe in RECIPES),
    *([MOE, EMBEDDED, overlay] for overlay in ALGORITHMS),
]


@pytest.mark.parametrize("paths", SHIPPED, ids=lambda paths: paths[-1].stem)
def test_shipped_configurations_load(paths: list[Path]) -> None:
    assert bool(load_config(paths).adapters) == (paths != [SERVICE])


def test_the_cluster_job_is_what_was_asked_for() -> None:
    config = load_config([MOE])
    adapter = config.adapters[0]
    assert config.model.path == "Qwen/Qwen3-30B-A3B-Base"
    assert (adapter.rank, adapter.alpha) == (32, 32)
    assert (adapter.sampling.n_samples, adapter.sampling.max_new_tokens) == (4, 1024)
    assert adapter.target_modules == ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    assert (adapter.optimizer.lr, config.rollout.max_staleness, config.rollout.tp) == (2e-5, 2, 2)
    assert (config.cluster.kind, config.cluster.nodes, config.cluster.devices_per_node) == ("slurm", 3, 8)


def test_overlay_changes_only_model_sizes_devices_and_counts() -> None:
    base, small = load_config([MOE]), load_config([MOE, EMBEDDED])
    assert small.model.path == str(EXAMPLES / "tiny_model"), "resolved next to the file that set it"
    assert small.adapters[0].task.kind == "word_problems", "a task of another kind replaces the whole section"
    assert small.adapters[0].algorithm == base.adapters[0].algorithm
    assert small.adapters[0].target_modules == base.adapters[0].target_modules
    assert small.rollout.max_staleness == base.rollout.max_staleness == 2
    assert (small.trainer.world_size, small.trainer.ep, small.cluster.device) == (2, 2, "cpu")


def test_adapters_merge_by_name_and_new_ones_are_added(tmp_path: Path) -> None:
    entry = load_config([MOE]).adapters[0].model_dump(mode="json")
    two = write(tmp_path, "two.yaml", json.dumps({"adapters": [{**entry, "name": "a"}, {**entry, "name": "b"}]}))
    overlay = write(tmp_path, "overlay.yaml", "adapters:\n  - {name: b, rank: 8}\n")
    config = load_config([MOE, two, overlay])
    assert {a.name: a.rank for a in config.adapters} == {"gsm8k": 32, "a": 32, "b": 8}
    unnamed = write(tmp_path, "unnamed.yaml", "adapters:\n  - {rank: 8}\n")
    with pytest.raises(ConfigError, match="without a name"):
        load_config([MOE, two, unnamed])


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("adapters.0.rank=4", lambda c: c.adapters[0].rank, 4),
        ("adapters.gsm8k.rank=4", lambda c: c.adapters[0].rank, 4),
        ("adapters.gsm8k.optimizer.lr=1e-4", lambda c: c.adapters[0].optimizer.lr, 1e-4),
        ("adapters.0.target_modules=[linear_fc*]", lambda c: c.adapters[0].target_modules, ["linear_fc*"]),
        ("adapters.0.task.kind=word_problems", lambda c: c.adapters[0].task.kind, "word_problems"),
        ("rollout.python=null", lambda c: c.rollout.python, None),
        ('adapters.0.sampling.stop=["\\n", " "]', lambda c: c.adapters[0].sampling.stop, ["\n", " "]),
        ("cluster.slurm.partition=gpu=big", lambda c: c.cluster.slurm.partition, "gpu=big"),
    ],
)
def test_override(override: str, read: object, expected: object) -> None:
    assert read(load_config([MOE], [override])) == expected  # type: ignore[operator]


def test_later_override_wins_over_files_and_earlier_ones() -> None:
    assert load_config([MOE, EMBEDDED], ["run.seed=2", "run.seed=3"]).run.seed == 3


@pytest.mark.parametrize("order", list(permutations(("kind=dapo", "eps_clip=0.07", "kl_coef=0.01"))), ids=str)
def test_a_kind_keeps_the_other_overrides_in_any_order(order: tuple[str, ...]) -> None:
    algorithm = load_config([MOE], [f"adapters.0.algorithm.{each}" for each in order]).adapters[0].algorithm
    assert (algorithm.kind, algorithm.eps_clip, algorithm.kl_coef) == ("dapo", 0.07, 0.01)


def test_of_two_kinds_the_later_one_wins() -> None:
    kinds = [f"adapters.0.algorithm.kind={kind}" for kind in ("dapo", "gspo")]
    assert [load_config([MOE], each).adapters[0].algorithm.kind for each in (kinds, kinds[::-1])] == ["gspo", "dapo"]


MADE = (
    "{name: z, rank: 8, alpha: 8, target_modules: [linear_qkv], task: {kind: gsm8k}, algorithm: {kind: grpo}, "
    "optimizer: {lr: 1e-5}, sampling: {prompts_per_step: 4, n_samples: 4, max_new_tokens: 64}}"
)


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (["0.algorithm={kind: grpo}", "0.algorithm.kind=dppo"], ["dppo"]),
        (["gsm8k.algorithm.eps_clip=0.1", "0.algorithm.kind=dppo"], ["dppo"]),
        (["0.algorithm.kind=dppo", "0.algorithm={kind: grpo}"], ["grpo"]),
        ([f"=[{MADE}, {{name: gsm8k}}]", "z.algorithm.eps_clip=0.1", "z.algorithm.kind=dppo"], ["grpo", "dppo"]),
    ],
)
def test_a_kind_comes_behind_what_makes_its_section(overrides: list[str], kinds: list[str]) -> None:
    texts = [f"adapters{each if each[0] == '=' else '.' + each}" for each in overrides]
    assert [adapter.algorithm.kind for adapter in load_config([MOE], texts).adapters] == kinds


@pytest.mark.parametrize("order", list(permutations(("kind=dataset", "train=a", "format.kind=chat"))), ids=str)
def test_the_kind_of_a_section_comes_before_that_of_one_inside(order: tuple[str, ...]) -> None:
    texts = [*(f"adapters.0.task.{each}" for each in order), "adapters.0.task.format.system_prompt=x"]
    task = load_config([MOE], texts).adapters[0].task
    assert isinstance(task, DatasetTask)
    assert (task.kind, task.format.kind, task.format.system_prompt) == ("dataset", "chat", "x")


@pytest.mark.parametrize(
    ("overrides", "dropped"),
    [
        (["eps_clip=0.07", "={kind: dapo}"], "kind dapo would drop eps_clip of"),
        (["={kind: dapo, eps_clip: 0.1}", "kind=gspo"], "kind gspo would drop eps_clip of"),
        (["={kind: dapo, eps_clip: 0.1}", "={kind: gspo}"], "kind gspo would drop eps_clip of"),
    ],
)
def test_an_override_drops_no_other_one_silently(overrides: list[str], dropped: str) -> None:
    texts = [f"adapters.gsm8k.algorithm{each if each[0] == '=' else '.' + each}" for each in overrides]
    with pytest.raises(ConfigError, match=rf"^adapters\.gsm8k\.algorithm: {dropped} the command line \(fix: give "):
        load_config([MOE], texts)


CHAT = "{kind: chat, template: 'Solve: {prompt}', system_prompt: Be brief., chat_template_kwargs: {think: false}}"
PLAIN = "{template: 'Solve: {prompt}'}"


@pytest.mark.parametrize(
    ("file", "overlay", "template", "system_prompt"),
    [
        (CHAT, "kind: chat_append", "Solve: {prompt}", "Be brief."),
        (CHAT, "prefill: x", "Solve: {prompt}", "Be brief."),
        (CHAT, "kind: template", "{prompt}", None),
        (PLAIN, "kind: template", "Solve: {prompt}", None),
        (PLAIN, "kind: chat", "Solve: {prompt}", None),
    ],
)
def test_a_format_keeps_what_its_new_kind_has(
    tmp_path: Path, file: str, overlay: str, template: str, system_prompt: str | None
) -> None:
    """Whether the kind is that of an override or of a file."""
    base = write(tmp_path, "base.yaml", f"adapters: [{{task: {{kind: dataset, train: a, format: {file}}}}}]\n")
    over = write(tmp_path, "over.yaml", f"adapters: [{{task: {{format: {{{overlay}}}}}}}]\n")
    by_override = f"adapters.0.task.format.{overlay.replace(': ', '=')}"
    for config in (load_config([MOE, base, over]), load_config([MOE, base], [by_override])):
        how = config.adapters[0].task.format
        assert (how.template, how.system_prompt) == (template, system_prompt)
        assert how.chat_template_kwargs == ({"think": False} if system_prompt else {})


def test_an_empty_map_of_own_keys_and_an_empty_list_of_adapters_replace(tmp_path: Path) -> None:
    task = "{kind: dataset, train: a, where: {level: 1}, format: {kind: chat, chat_template_kwargs: {think: true}}}"
    adapter = f"{{name: a, rank_pattern: {{q: 4}}, task: {task}}}"
    base = write(tmp_path, "base.yaml", f"rollout: {{engine_args: {{x: 1}}}}\nadapters: [{adapter}]\n")
    empty = ["adapters.0.task.where={}", "adapters.0.rank_pattern={}", "adapters.0.task.format.chat_template_kwargs={}"]
    config = load_config([MOE, base], [*empty, "rollout.engine_args={}", "rollout={}", "adapters.0.sampling={}"])
    [chosen] = config.adapters
    assert config.rollout.engine_args == chosen.rank_pattern == chosen.task.where == {}
    assert chosen.task.format.chat_template_kwargs == {}
    assert (config.rollout.tp, chosen.task.format.kind, chosen.sampling.n_samples) == (2, "chat", 4), "sections merge"
    service = write(tmp_path, "service.yaml", "service: {}\nadapters: []\n")
    assert load_config([MOE, service]).adapters == []
    with pytest.raises(ConfigError, match="a run without a service has at least one adapter"):
        load_config([MOE], ["adapters=[]"])


def test_maps_of_own_keys_are_those_of_no_section() -> None:
    """By the schema: an object with values of any name."""

    def maps(node: object) -> Iterator[str]:
        for child in node if isinstance(node, list) else node.values() if isinstance(node, dict) else ():
            yield from maps(child)
        for key, field in (node.get("properties") or {}).items() if isinstance(node, dict) else ():
            if any(
                "additionalProperties" in option for option in [field, *field.get("anyOf", []), *field.get("oneOf", [])]
            ):
                yield key

    assert set(maps(Config.model_json_schema())) == OWN_KEYS


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("adapters.0.rnak=4", ["adapters.0.rnak", "unknown key", "use adapters.0.rank"]),
        ("rollout.tensor_parallel_size=2", ["unknown key", "use rollout.tp"]),
        ("adapters.0.lora_alpha=4", ["unknown key", "use adapters.0.alpha"]),
        ("adapters.0.sampling.num_generations=4", ["unknown key", "use adapters.0.sampling.n_samples"]),
        ("adapters.0.optimizer.beta=[0.9,0.95]", ["unknown key", "use adapters.0.optimizer.betas"]),
        ("eval.problems=4", ["unknown key", "use one of every_steps below eval"]),
        ("adapters.gsm8k.optimizer.l_r=1", ["adapters.0.optimizer.l_r", "use adapters.0.optimizer.lr"]),
        ("adapters.0.algorithm.eps_clipp=1", ["use adapters.0.algorithm.eps_clip"]),
        ("trainr.tp=2", ["trainr", "use trainer"]),
        ("adapters.0.lr=1", ["use adapters.0.optimizer.lr"]),
        ("trainer.max_lora_rank=1", ["use rollout.max_lora_rank"]),
        ("trainer.tp=two", ["trainer.tp", "'two'", "integer", "the command line"]),
        ("trainer.tp=0", ["trainer.tp", "0 is not allowed", "greater than 0"]),
        ("cluster.kind=k8s", ["cluster.kind", "'k8s'", "'local', 'slurm' or 'nodes'"]),
        ("adapters.0.algorithm.kind=gpro", ["adapters.0.algorithm", "gpro", "'grpo'"]),
        ("adapters.7.rank=1", ["there is no adapter '7'", "gsm8k"]),
        ("trainer.tp.x=1", ["trainer.tp is a value"]),
        ("trainer", ["is not an override"]),
        ("=3", ["is not an override"]),
        ("adapters.gsm8k=3", ["cannot be replaced as a whole"]),
        ("run.name=[", ["not valid YAML"]),
        ("run.name=2026-02-30", ["not valid YAML"]),
        ("run.name=&x [*x]", ["not valid YAML"]),
        ("adapters.0.optimizer.lr=.inf", ["adapters.0.optimizer.lr", "finite"]),
        ("adapters=3", ["adapters: 3 is not allowed", "give a list"]),
        ("run.steps=ten", ["run.steps", "'ten'", "(fix: give an integer)"]),
        ("adapters.0.rank=8.5", ["(fix: give an integer)"]),
        ("adapters.0.optimizer.lr=1e-5x", ["(fix: give a number)"]),
        ("trainer.tp=0", ["(fix: give a number greater than 0)"]),
        ("rollout.remote={port: 65536}", ["rollout.remote.port", "(fix: give a number of at most 65535)"]),
        ("checkpoint.keep_last=1", ["(fix: give a number of at least 2)"]),
        ("trainer.cpu_offload=maybe", ["(fix: give true or false)"]),
        ("trainer.recompute=true", ["trainer.recompute", "'selective'", "'full'"]),
        ("adapters.0.target_modules=all-linear", ["'all-linear'", "give a list: [...]"]),
        ("adapters.0.algorithm=grpo", ["give the keys of this section below it"]),
        ("adapters.0.reward={kind: exact}", ["adapters.0.reward.kind: 'exact'", "give one of 'numeric_match'"]),
        ("adapters.0.reward={kind: code}", ["adapters.0.reward: there are no tests (in the command line)", "name a"]),
        ("cluster.nodes=1000000000000", ["cluster.nodes", "(fix: give a number of at most 65536)"]),
        ("rollout.servers=1000000000000", ["rollout.servers", "(fix: give a number of at most 65536)"]),
        ("trainer.world_size=1000000000000", ["trainer.world_size", "(fix: give a number of at most 65536)"]),
        ("adapters.0.rank=1000000000000", ["adapters.0.rank", "(fix: give a number of at most 65536)"]),
        ("weight_sync.bucket_mib=1e-300", ["weight_sync.bucket_mib", "(fix: give a number of at least 0.0001"]),
        ("adapters.0.sampling.stop=['']", ["adapters.0.sampling.stop.0: ''", "(fix: give a text that is not empty)"]),
        ("run.name=a/b", ["(fix: give letters, digits, dots, underscores and hyphens"]),
        ("cluster.slurm.time_limit=forever", ["HH:MM:SS"]),
        ("cluster.slurm.time_limit=24:00:00", ["86400", "put the value into quotes"]),
        ("rollout.n=8", ["use one of servers, tp,", "below rollout"]),
        ("adapters.0.algorithm.use_kl_loss=true", ["use one of kind, advantage,", "below adapters.0.algorithm"]),
        ("adapters.math.rank=1", ["(fix: use gsm8k, or its number, 0)"]),
    ],
)
def test_wrong_override_is_one_line_with_the_fix(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([MOE], [override])
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_an_entry_that_is_no_section_has_no_keys_to_override(tmp_path: Path) -> None:
    file = write(tmp_path, "o.yaml", "adapters: [3, {name: a}]\n")
    with pytest.raises(ConfigError, match="there is no adapter '0'"):
        load_config([file], ["adapters.0.rank=4"])


def test_unknown_key_in_a_file_names_file_and_line(tmp_path: Path) -> None:
    overlay = write(tmp_path, "o.yaml", "rollout:\n  tp: 2\n  max_stalenes: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config([MOE, overlay])
    assert str(caught.value) == (f"rollout.max_stalenes: unknown key in {overlay}:3 (fix: use rollout.max_staleness)")


def test_unknown_key_of_an_adapter_names_the_right_file(tmp_path: Path) -> None:
    overlay = write(tmp_path, "o.yaml", "adapters:\n  - task:\n      n_evl: 3\n")
    with pytest.raises(ConfigError, match=r"adapters\.0\.task\.n_evl: unknown key in .*o\.yaml:3 .*task\.n_eval"):
        load_config([MOE, overlay])


def test_every_pattern_of_the_configuration_has_words() -> None:
    def patterns(schema: object) -> Iterator[str]:
        if isinstance(schema, dict):
            if isinstance(schema.get("pattern"), str):
                yield schema["pattern"]
            for value in schema.values():
                yield from patterns(value)
        elif isinstance(schema, list):
            for value in schema:
                yield from patterns(value)

    found = set(patterns(Config.model_json_schema()))
    assert len(found) > 5
    assert [pattern for pattern in found if "matches" in described(pattern)] == []


def test_an_overlay_alone_is_sent_to_the_file_below_it(tmp_path: Path) -> None:
    overlay = write(tmp_path, "a.yaml", "adapters: [{name: a, reward: {timeout_s: 2}}]\n")
    with pytest.raises(ConfigErrors, match=r"reward\.kind: is required .*or give the file that this one overlays"):
        load_config([overlay])


def test_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.steps: is required"):
        load_config([write(tmp_path, "a.yaml", MOE.read_text().replace("  steps: 200\n", ""))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: [", "not valid YAML"),
        ("- 1\n", "holds a list"),
        ("run: {name: a}\nrun: {name: b}\n", "given twice"),
        ("run: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("run: &a\n  x: *a\n", "found unconstructable recursive node"),
        ("run: {name: 2025-02-30}\n", "not valid YAML: day is out of range for month"),
        ("run: !!timestamp soon\n", "not valid YAML"),
        pytest.param("run: " + "[" * 9000, "not valid YAML: maximum recursion depth", id="deep"),
    ],
)
def test_wrong_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([MOE, write(tmp_path, "x.yaml", text)])


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(["nowhere.yaml"])


def test_relative_path_falls_back_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    assert load_config([MOE], ["model.path=model"]).model.path == str(tmp_path / "cwd" / "model")
    for absent in ("absent", "x" * 300):  # names of files have at most 255 bytes
        assert load_config([MOE], [f"model.path={absent}"]).model.path == absent


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    config = load_config([MOE], ["run.root=~/runs", "model.path=~/model", "adapters.0.init_from=~no-such-user/x"])
    assert config.run_folder.path == Path("/somewhere/runs") / config.run.name
    assert (config.model.path, config.adapters[0].init_from) == ("/somewhere/model", "~no-such-user/x")


@pytest.mark.parametrize(("env", "found"), [("own.py:Own", "{folder}/own.py:Own"), ("own", "own")])
def test_a_class_in_a_file_is_found_beside_the_configuration_and_a_package_keeps_its_name(
    tmp_path: Path, env: str, found: str
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own.py").write_text("")
    (tmp_path / "more.yaml").write_text(f"adapters: [{{workflow: {{kind: gym, env: '{env}'}}}}]")
    workflow = load_config([MOE, EMBEDDED, tmp_path / "more.yaml"]).adapters[0].workflow
    assert isinstance(workflow, WorkerWorkflowConfig)
    assert workflow.env == found.format(folder=tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        "{kind: mcp}",
        "{kind: gym}",
        "{kind: mcp, env: a}",
        "{kind: gym, env: a, servers: [b]}",
        "{kind: openenv, env: a}",
    ],
)
def test_an_environment_is_named_as_its_kind_needs_it(tmp_path: Path, keys: str) -> None:
    (tmp_path / "more.yaml").write_text(f"adapters: [{{workflow: {keys}}}]")
    with pytest.raises(ConfigError, match=r"^adapters\.0\.workflow"):
        load_config([MOE, EMBEDDED, tmp_path / "more.yaml"])


def test_all_wrong_keys_are_reported_at_once(tmp_path: Path) -> None:
    wrong = write(tmp_path, "wrong.yaml", "run: {nmae: x, steps: many}\nadapters:\n  - {rank: -1, alhpa: 3}\n")
    with pytest.raises(ConfigErrors) as refused:
        load_config([MOE, wrong])
    found = {error.path: str(error) for error in refused.value.errors}
    assert list(found) == ["run.nmae", "adapters.0.alhpa", "run.steps", "adapters.0.rank"]
    assert all(f"{wrong}:{1 if 'run.' in path else 3}" in text for path, text in found.items())


def test_a_misspelt_required_key_is_reported_once(tmp_path: Path) -> None:
    text = MOE.read_text().replace("  path: Qwen", "  pth: Qwen", 1)
    with pytest.raises(ConfigError, match=r"model.pth: unknown key .*use model.path"):
        load_config([write(tmp_path, "wrong.yaml", text)])


def test_one_source_does_not_name_an_adapter_twice(tmp_path: Path) -> None:
    name = load_config([MOE]).adapters[0].name
    with pytest.raises(ConfigError, match=f"the command line names '{name}' twice"):
        load_config([MOE], [f"adapters=[{{name: {name}}}, {{name: {name}, rank: 4}}]"])
