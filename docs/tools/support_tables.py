"""The pairs of the support table, the tests behind each, and docs/en/support.md made of them.

A pair is a value on each of two axes of `support.Combination`. It is refused by what `support.REFUSALS` says of the
two alone; otherwise it names the tests that prove it, as pytest's node ids. In a test that is parametrised over more
than the pair, the id leaves the rest out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_lora.config.sections.adapter import PRESETS
from areal_lora.config.support import (
    ENGINES,
    LAYOUTS,
    MODES,
    NEEDS,
    PACKED,
    REFUSALS,
    UNSERVED,
    Combination,
    Refusal,
    group_of,
)
from areal_lora.families.registry import FAMILIES, supported

TARGET = Path("docs/en/support.md")
OTHER = "any other"
"""Row of the model types that are in no list."""
Tests = tuple[str, ...]
_ROWS, _ROWLESS = supported(), tuple(sorted(PACKED))
_PRESETS: dict[str, Mapping[str, object]] = {str(kind): row for kind, row in PRESETS.items()}
_KINDS = tuple(_PRESETS)
_SERVED = tuple(kind for kind in _ROWLESS if kind not in UNSERVED)
_WITH_EXPERTS = ("ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "olmoe")
"""Families without a row whose experts are published one by one."""

_LAYOUTS = "tests/process/distributed/test_layouts.py"
_STEP = f"{_LAYOUTS}::test_one_step_equals_autograd_through_transformers"
_CRITIC = f"{_LAYOUTS}::test_a_critic_gives_values_and_gradients_like_transformers"
_FROZEN = f"{_LAYOUTS}::test_a_frozen_copy_scores_as_its_source_did_until_it_is_replaced"
_BASE = f"{_LAYOUTS}::test_base_scores_like_transformers_on_every_rank"
_SCORES = f"{_LAYOUTS}::test_adapter_scores_like_transformers"
_BESIDE = f"{_LAYOUTS}::test_an_adapter_trains_beside_another_one_as_if_it_were_alone"
_ALIKE = f"{_LAYOUTS}::test_both_engines_publish_alike"
_MERGED_RANKS = "tests/process/distributed/test_merged.py::test_every_weight_is_what_a_float64_oracle_says"
_MERGED_SERVER = (
    "tests/process/engine/vllm_ext/test_merged.py::"
    "test_a_version_scores_like_merged_hugging_face_and_never_builds_on_the_last"
)
_SERVER = "tests/process/engine/vllm_ext/test_server.py::test_published_versions_score_like_merged_hugging_face"
_FAMILY_SERVER = "tests/process/engine/vllm_ext/test_families.py::test_an_adapter_scores_like_merged_hugging_face"
_SHARED_SLOTS = "tests/process/engine/vllm_ext/test_shared_slots.py::test_what_experts_share_scores_like_hugging_face"
_ONE_FOR_ALL = "tests/process/engine/vllm_ext/test_families.py::test_experts_that_share_one_adapter"
_ROWLESS_TESTS = "tests/process/engine/test_without_a_row.py"
_PEFT = f"{_ROWLESS_TESTS}::test_scores_and_exports_like_stock_peft"
_ROWLESS_MERGED = f"{_ROWLESS_TESTS}::test_scores_like_merged_weights"
_ROWLESS_SERVER = f"{_ROWLESS_TESTS}::test_a_real_server_scores_a_published_adapter_alike"
_NAMES = "tests/unit/families/test_sites_checkpoints.py::test_names_and_sizes_are_those_of_the_checkpoint"
_OVERLAY = "tests/e2e/test_overlays.py::test_an_algorithm_learns_the_task"
_DISTILLED = "tests/e2e/test_overlays.py::test_distillation_from_a_served_version_learns_the_task"
_SHORT_FSDP = "tests/e2e/test_overlays.py::test_given_answers_and_then_rollouts"
_ENTROPY = "tests/unit/engine/layers/test_output.py::test_whole_vocabulary"
_CRITIC_RUN = "tests/e2e/test_critic_run.py::test_every_step_trains_the_critic_also_after_the_resume"
_EMBEDDED = "tests/e2e/test_embedded_run.py::test_it_ends_well_and_says_what_it_made"
_MERGED_RUN = "tests/e2e/test_merged_run.py::test_a_merged_run_survives_a_half_written_server_and_goes_on"
_THREE = "tests/e2e/test_three_adapters.py::test_each_adapter_ends_by_itself_and_is_exported"
_LOSS = "tests/unit/algorithms/test_losses.py::test_loss_and_gradient_equal_the_loop"
_ADVANTAGE = "tests/unit/algorithms/test_advantages.py::test_advantage_equals_the_loop"
_GREEDY = (
    "tests/unit/rollout/test_workflow_baseline.py::"
    "test_the_greedy_answers_reward_is_the_baseline_and_nothing_of_it_is_trained_on"
)
_MINIBATCHES = "tests/unit/trainer/test_learn_positions.py::test_old_ref_current_and_rollout_logprobs_line_up"
_KIND_OF = {"qwen3_moe": "", "qwen3": "dense"}
"""Families under another name in `test_layouts`."""

_LOSS_OF = {"gspo": "gspo", "cispo": "cispo", "opo": "reinforce", "gpg": "reinforce", "remax": "reinforce"}
_LOSS_OF |= {"tis": "TIS", "mis": "MIS of sequences", "geo_mis": "MIS of geometric means", "icepop": "IcePop"}
_LOSS_OF |= {"sapo": "sapo", "dppo": "dppo", "kpop": "kpop"}
_DISTILL = (
    "tests/unit/algorithms/test_advantages_credit.py::"
    "test_distillation_adds_each_tokens_reverse_divergence_to_its_own_advantage"
)
_GAE = "tests/unit/algorithms/test_advantages.py::test_gae_equals_the_sum_of_its_definition"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Pairs of two axes: ``tests`` by (row, column) for each pair that no refusal names."""

    title: str
    intro: str
    axes: tuple[str, str]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    tests: Mapping[tuple[str, str], Tests]

    def cells(self) -> Iterator[tuple[str, str]]:
        return ((row, column) for row in self.rows for column in self.columns)


def _has_experts(family: str) -> bool:
    return family in _WITH_EXPERTS or (family in FAMILIES.rows and FAMILIES.rows[family].experts is not None)


def _layouts_of(family: str) -> tuple[str, ...]:
    """To a model without experts ``per_expert``, the default, is the same as ``none``."""
    return LAYOUTS if _has_experts(family) else LAYOUTS[:2]


def combination(table: Table, row: str, column: str) -> Combination:
    """A combination with the two values of a cell and, on the other axes, what the family needs."""
    chosen = dict(zip(table.axes, (row, column), strict=True))
    family = chosen.get("family", "qwen3" if chosen.get("layout") == "none" else "qwen3_moe")
    experts = _has_experts(family)
    c = Combination(
        family=family,
        experts=experts,
        engine="megatron" if group_of(family) == "row" else "fsdp",
        layout="per_expert" if experts else "none",
    )
    needs = frozenset({chosen["needs"]}) if "needs" in chosen else frozenset()
    # The values of a table's axes are those of the Literal types.
    return replace(c, **{axis: v for axis, v in chosen.items() if axis != "needs"}, needs=needs)  # type: ignore[arg-type]


def _axes(refusal: Refusal) -> frozenset[str]:
    """The axes of `Combination` on which it depends; what is known of a family counts as the family."""
    named = {"engine": refusal.engine, "layout": refusal.layout, "mode": refusal.mode, "needs": refusal.needs}
    of_family = {"family"} if refusal.group or refusal.experts is not None else set()
    return frozenset({axis for axis, values in named.items() if values} | of_family)


def refused(table: Table, row: str, column: str) -> tuple[Refusal, ...]:
    """The refusals that the two values alone decide."""
    c, axes = combination(table, row, column), frozenset(table.axes)
    return tuple(r for r in REFUSALS if _axes(r) <= axes and r.matches(c))


def conditions(table: Table, row: str, column: str) -> tuple[Refusal, ...]:
    """The refusals that need both values and something else."""
    c, axes = combination(table, row, column), frozenset(table.axes)

    def on_these(r: Refusal) -> Refusal:
        free: dict[str, Any] = dict.fromkeys({"engine", "layout", "mode"} - axes, ())
        free |= {} if "needs" in axes else {"needs": frozenset()}
        free |= {} if "family" in axes else {"group": (), "experts": None}
        return replace(r, **free)

    return tuple(r for r in REFUSALS if axes < _axes(r) and on_these(r).matches(c))


def _megatron(family: str) -> str:
    return _KIND_OF.get(family, family) or "single"


def _fsdp(family: str) -> str:
    if family == "qwen2_moe":
        return "fsdp4_qwen2_moe_shared"
    return f"fsdp2_{_KIND_OF.get(family, family)}".rstrip("_")


def _rowless(kind: str) -> Tests:
    return (f"{_ROWLESS_MERGED if kind in ('ernie4_5_moe', 'exaone_moe', 'glm4_moe') else _PEFT}[{kind}]",)


def _arithmetic(kind: str) -> Tests:
    advantage = str(_PRESETS[kind].get("advantage", "grpo"))
    of_answers = {"gae": _GAE, "none": f"{_DISTILL}[none]"}.get(advantage, f"{_ADVANTAGE}[{advantage}]")
    return (of_answers, f"{_LOSS}[{_LOSS_OF.get(kind, 'ppo')}]")


ENGINE_FAMILY = Table(
    title="Engine and family",
    intro="A training step, or the scores of an adapter, equal those of transformers or stock PEFT.",
    axes=("family", "engine"),
    rows=(*_ROWS, *_ROWLESS, OTHER),
    columns=ENGINES,
    tests={(kind, "megatron"): (f"{_STEP}[{_megatron(kind)}]",) for kind in _ROWS}
    | {(kind, "fsdp"): (f"{_STEP}[{_fsdp(kind)}]",) for kind in _ROWS}
    | {(kind, "fsdp"): _rowless(kind) for kind in _SERVED},
)

_UNMERGED_ROWS: dict[str, Tests] = {
    "qwen3_moe": (_SERVER,),
    "llama": (f"{_FAMILY_SERVER}[llama]",),
    "mistral": (f"{_FAMILY_SERVER}[mistral tp2]",),
    "qwen2_moe": (f"{_FAMILY_SERVER}[qwen2_moe tp2]",),
    "mixtral": (f"{_FAMILY_SERVER}[mixtral tp2 ep2]",),
    "qwen3": (f"{_FAMILY_SERVER}[qwen3]",),
    "qwen2": (f"{_FAMILY_SERVER}[qwen2]",),
}
MODE_FAMILY = Table(
    title="Rollout mode and family",
    intro="A real server scores a published version as merged weights in transformers do.",
    axes=("family", "mode"),
    rows=(*_ROWS, *_ROWLESS),
    columns=MODES,
    tests={(kind, "unmerged"): tests for kind, tests in _UNMERGED_ROWS.items()}
    | {(kind, "unmerged"): (f"{_ROWLESS_SERVER}[{kind}]",) for kind in _SERVED}
    | {(k, "merged"): (f"{_MERGED_SERVER}[{'qwen2_moe tp2' if k == 'qwen2_moe' else k}]",) for k in _ROWS},
)

LAYOUT_FAMILY = Table(
    title="Expert layout and family",
    intro="The tensors of an adapter are exactly the linear layers of the checkpoint, each once. `none`: no expert is "
    "adapted. Whether a family without a row has experts is read from its checkpoint.",
    axes=("family", "layout"),
    rows=(*_ROWS, "phi3", "olmoe"),
    columns=LAYOUTS,
    tests={(kind, layout): (_NAMES,) for kind in _ROWS for layout in _layouts_of(kind)}
    | {("phi3", layout): _rowless("phi3") for layout in LAYOUTS[:2]}
    | {("olmoe", "per_expert"): _rowless("olmoe")}
    | {("olmoe", layout): (f"{_ROWLESS_TESTS}::test_experts_that_share[{layout}]",) for layout in LAYOUTS[2:]}
    | {("olmoe", "none"): (f"{_ROWLESS_TESTS}::test_experts_that_share[none]",)},
)

ENGINE_LAYOUT = Table(
    title="Engine and expert layout",
    intro="A training step equals autograd through transformers.",
    axes=("layout", "engine"),
    rows=LAYOUTS,
    columns=ENGINES,
    tests={
        ("none", "megatron"): (f"{_STEP}[dense_tp2]",),
        ("per_expert", "megatron"): (f"{_STEP}[tp2_ep2]",),
        ("shared", "megatron"): (f"{_STEP}[tp2_ep2_shared]",),
        ("shared_outer", "megatron"): (f"{_STEP}[ep2_etp2_outer]",),
        ("none", "fsdp"): (f"{_STEP}[fsdp2_dense]",),
        ("per_expert", "fsdp"): (f"{_STEP}[fsdp4]",),
        ("shared", "fsdp"): (f"{_STEP}[fsdp4_qwen2_moe_shared]",),
        ("shared_outer", "fsdp"): (f"{_STEP}[fsdp2_outer]",),
    },
)

MODE_LAYOUT = Table(
    title="Rollout mode and expert layout",
    intro="What the trainer's ranks send, and what a server makes of it.",
    axes=("layout", "mode"),
    rows=LAYOUTS,
    columns=MODES,
    tests={
        ("none", "unmerged"): (f"{_FAMILY_SERVER}[llama]",),
        ("per_expert", "unmerged"): (_SERVER,),
        ("shared", "unmerged"): (f"{_ONE_FOR_ALL}[mixtral tp2 ep2]",),
        ("shared_outer", "unmerged"): (
            f"{_SHARED_SLOTS}[qwen3_moe]",
            "tests/process/distributed/test_matrix.py::test_every_layout_loads_and_packs_bit_for_bit",
        ),
        ("none", "merged"): (f"{_MERGED_SERVER}[llama]",),
        ("per_expert", "merged"): (f"{_MERGED_RANKS}[tp2 ep2]",),
        ("shared", "merged"): (f"{_MERGED_RANKS}[tp2 ep2, one adapter for all experts]",),
        ("shared_outer", "merged"): (
            f"{_MERGED_RANKS}[tp2 ep2, lora_A of gate and up shared]",
            f"{_MERGED_RANKS}[fsdp2, lora_A of gate and up shared]",
        ),
    },
)

ENGINE_MODE = Table(
    title="Engine and rollout mode",
    intro="Whole runs with a real server, and what the ranks send.",
    axes=("mode", "engine"),
    rows=MODES,
    columns=ENGINES,
    tests={
        ("unmerged", "megatron"): (_EMBEDDED,),
        ("unmerged", "fsdp"): (_SHORT_FSDP, f"{_ALIKE}[fsdp2]"),
        ("merged", "megatron"): (_MERGED_RUN,),
        ("merged", "fsdp"): (f"{_MERGED_RANKS}[fsdp2]",),
    },
)

ALGORITHMS = Table(
    title="Algorithm and engine",
    intro="With Megatron the whole run of the nightly tests. With FSDP the preset's advantage and loss against a loop "
    "over the published formulas: they are the same code for both engines, which see numbers and no algorithm; the "
    "next table has what they compute.",
    axes=("algorithm", "engine"),
    rows=_KINDS,
    columns=ENGINES,
    tests={(kind, "megatron"): (f"{_OVERLAY}[{kind}]",) for kind in _KINDS}
    | {("distill", "megatron"): (_DISTILLED,)}
    | {(kind, "fsdp"): _arithmetic(kind) for kind in _KINDS}
    | {("grpo", "fsdp"): (_SHORT_FSDP, "tests/e2e/test_overlays.py::test_the_fsdp_engine_learns_the_task")},
)

ASKS_ENGINE = Table(
    title="What an algorithm needs of an engine",
    intro="References, critic, and what several adapters need.",
    axes=("needs", "engine"),
    rows=("several minibatches", "KL to the base", "KL to a version", "entropy bonus", "critic", "several adapters"),
    columns=ENGINES,
    tests={
        ("several minibatches", "megatron"): (f"{_SCORES}[tp2_ep2]", _MINIBATCHES),
        ("several minibatches", "fsdp"): (f"{_SCORES}[fsdp2]", _MINIBATCHES),
        ("KL to the base", "megatron"): (f"{_BASE}[tp2_ep2]",),
        ("KL to the base", "fsdp"): (f"{_BASE}[fsdp2]",),
        ("KL to a version", "megatron"): (f"{_FROZEN}[tp2_ep2]", _CRITIC_RUN),
        ("KL to a version", "fsdp"): (f"{_FROZEN}[fsdp2]",),
        ("entropy bonus", "megatron"): (_ENTROPY, f"{_STEP}[tp2_ep2]"),
        ("entropy bonus", "fsdp"): (_ENTROPY, f"{_STEP}[fsdp2]"),
        ("critic", "megatron"): (f"{_CRITIC}[tp2_ep2]", _CRITIC_RUN),
        ("critic", "fsdp"): (f"{_CRITIC}[fsdp2]",),
        ("several adapters", "megatron"): (f"{_BESIDE}[tp2_ep2]", _THREE),
        ("several adapters", "fsdp"): (f"{_BESIDE}[fsdp2]",),
    },
)

ASKS_MODE = Table(
    title="What an algorithm needs of servers",
    intro="Greedy answers (ReMax) and scores of given answers (`sft.steps`) are requests like any other, to a server "
    "that scores a version like transformers.",
    axes=("needs", "mode"),
    rows=("greedy answers", "given answers", "several adapters"),
    columns=MODES,
    tests={
        ("greedy answers", "unmerged"): (_GREEDY, f"{_OVERLAY}[remax]"),
        ("greedy answers", "merged"): (_GREEDY, f"{_MERGED_SERVER}[qwen3_moe]"),
        ("given answers", "unmerged"): (_SHORT_FSDP,),
        ("given answers", "merged"): (f"{_MERGED_SERVER}[qwen3_moe]",),
        ("several adapters", "unmerged"): (_THREE,),
    },
)

TABLES = (
    ENGINE_FAMILY,
    MODE_FAMILY,
    LAYOUT_FAMILY,
    ENGINE_LAYOUT,
    MODE_LAYOUT,
    ENGINE_MODE,
    ALGORITHMS,
    ASKS_ENGINE,
    ASKS_MODE,
)

INTRO = """\
# What works together

This page is generated from `areal_lora/config/support.py` and `docs/tools/support_tables.py` by `make docs`. The
start-up check reads the same table, so a cell that is refused here is refused there with the same words.

Engine, model family, expert layout, rollout mode and algorithm are judged in pairs. A combination of five is supported
if none of its pairs, and nothing in [Refused](#refused), is refused. `support_tables.py` names the tests of each
supported pair. **no** is a refusal, *if* one that needs something else, too. Rows with equal cells are one row.

A config.json may require something beyond its family that an engine does not compute ([models](models.md)); sizes,
devices and files are judged by other rules.
"""


def render() -> str:
    """The whole page as Markdown."""
    return "\n".join([INTRO, *map(_table, TABLES), _refusals()])


def _table(table: Table) -> str:
    lines = [f"## {table.title}\n\n{table.intro}\n", f"| {table.axes[0]} | {' | '.join(table.columns)} |"]
    lines.append("|---" * (1 + len(table.columns)) + "|")
    rows: dict[str, list[str]] = {}
    for row in table.rows:
        rows.setdefault(" | ".join(_cell(table, row, column) for column in table.columns), []).append(row)
    lines += [f"| {', '.join(names)} | {cells} |" for cells, names in rows.items()]
    return "\n".join(lines) + "\n"


def _cell(table: Table, row: str, column: str) -> str:
    if found := refused(table, row, column):
        return "**no** " + ", ".join(f"({_letter(r)})" for r in found)
    return ", ".join(["yes", *(f"*if* ({_letter(r)})" for r in conditions(table, row, column))])


def _letter(refusal: Refusal) -> str:
    return chr(ord("a") + REFUSALS.index(refusal))


def _refusals() -> str:
    lines = ["## Refused\n", "| | if all of this holds | key | reason | what to do |", "|---|---|---|---|---|"]
    for refusal in REFUSALS:
        reason = refusal.text("<type>")
        key = refusal.key.replace("{i}", "N")
        lines.append(f"| {_letter(refusal)} | {_when(refusal)} | `{key}` | {reason} | {refusal.fix} |")
    return "\n".join(lines) + "\n"


def _when(refusal: Refusal) -> str:
    words = {
        "engine": refusal.engine,
        "family": refusal.group,
        "layout": refusal.layout,
        "mode": refusal.mode,
        "needs for": tuple(ask for ask in NEEDS if ask in refusal.needs),
    }
    found = [f"{name} {(' and ' if name == 'needs for' else ' or ').join(v)}" for name, v in words.items() if v]
    if refusal.experts is not None:
        found.append("the model has experts" if refusal.experts else "no experts")
    return "; ".join(found)
