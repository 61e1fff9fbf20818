"""The sections ``task``, ``workflow``, ``reward`` and ``evals`` of an adapter."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Discriminator, Field, PositiveFloat, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from areal_lora.config.sections.section import NAME, NonNegFloat, NonNegInt, PositiveInt, Scalar, Section, ServedModel


class PromptFormat(Section):
    kind: Literal["template", "chat", "chat_append"] = "template"
    """`chat`: by the tokenizer's chat template; with `chat_append` earlier turns stay as sampled."""
    template: str = "{prompt}"
    """Text of the prompt or of the user message; `{name}` is replaced by that column, `{prompt}` by `columns.prompt`.
    Unused with `columns.messages`."""
    system_prompt: str | None = None
    """System message put first, unless the row's messages start with one (`chat`)."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Arguments of the chat template, such as `enable_thinking: false` (`chat`)."""
    prefill: str = Field("", description="Text with which each answer starts; it is given, not sampled (`chat`).")

    @property
    def is_chat(self) -> bool:
        return self.kind != "template"

    @model_validator(mode="after")
    def _only_of_a_chat(self) -> Self:
        for key in ("system_prompt", "chat_template_kwargs", "prefill"):
            if getattr(self, key) and not self.is_chat:
                raise ValueError(f"kind template has no {key}: set kind=chat, or leave it out")
        return self


class Columns(Section):
    prompt: str = Field("prompt", description="Column with the text of the problem.")
    messages: str | None = Field(None, description="Column with chat messages (`role`, `content`); replaces `prompt`.")
    answer: str | None = "answer"
    """Column with the gold answer, of any type, or a field in it: `reward_model.ground_truth`; null if the reward needs
    none."""


class WordProblemsTask(Section):
    kind: Literal["word_problems"] = "word_problems"
    level: Literal["two_step", "three_step"] = "two_step"
    """`three_step`: harder, with numbers of two digits; for the model `tiny_pupil`."""
    n_train: PositiveInt = Field(4096, description="Size of the generated training split.")
    n_eval: PositiveInt = Field(256, description="Size of the held-out split (disjoint from training).")
    format: ClassVar[PromptFormat] = PromptFormat()


GSM8K: dict[str, Any] = {
    "train": "openai/gsm8k",
    "eval": "openai/gsm8k",
    "subset": "main",
    "n_eval": 1319,
    "columns": {"prompt": "question", "answer": "answer"},
    "format": {"template": "Question: {question}\nAnswer:"},
}
"""What ``kind: gsm8k`` sets; its answers end with ``#### n``."""


class DatasetTask(Section):
    kind: Literal["dataset", "gsm8k"] = "dataset"
    """`gsm8k`: rows with `question` and `answer`, whose answers end with `#### n`."""
    train: str = Field(description="JSONL, JSON, CSV or parquet file, a folder of them, or a hub data set `org/name`.")
    eval: str | None = Field(None, description="Held-out rows, as `train`; if unset, `n_eval` rows of `train`.")
    columns: Columns = Columns()
    format: PromptFormat = PromptFormat()
    subset: str | None = Field(None, description="Configuration of a hub data set, such as `main`.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub data set.")
    train_split: str = Field("train", description="Split of a hub data set or folder to train on.")
    eval_split: str = Field("test", description="Split of a hub data set or folder that is held out.")
    n_train: PositiveInt | None = Field(None, description="Use only so many training rows, the first ones.")
    n_eval: PositiveInt | None = Field(None, description="Use only so many held-out rows, the first ones.")
    where: dict[str, Scalar | list[Scalar]] = Field({})
    """Keep rows with these values, such as `level: [1, 2]`."""
    keep: str | None = None
    """`package.module:name` or `file.py:name` of `keep(row) -> bool`; it gets each row as a dict."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("kind") == "gsm8k":
            return {**GSM8K, **data}
        return data


TaskConfig = Annotated[WordProblemsTask | DatasetTask, Field(discriminator="kind")]


class SingleTurnWorkflowConfig(Section):
    kind: Literal["single_turn"] = "single_turn"
    calls_endpoint: ClassVar[bool] = False


class WorkerWorkflowConfig(Section):
    """Code of users, in worker processes: an environment, a workflow, or what calls the OpenAI endpoint."""

    kind: Literal["agent", "multi_turn", "custom", "verifiers", "gym", "mcp", "openenv"] = "agent"
    path: str | None = None
    """`package.module:name` or `file.py:name` of `agent(task) -> float | None`, async or not, which calls the OpenAI
    endpoint in `task` with the key in `task`; of `factory(context, **args)` (`custom`)."""
    env: str | list[str] | None = None
    """`file.py:Class` of an Environment (`multi_turn`) or a class with gymnasium's methods (`gym`), taskset
    (`verifiers`), or URL (`openenv`); URLs, or commands that start a server per sample (`mcp`)."""
    args: dict[str, Any] = Field(
        {}, description="Keys of the environment, arguments of its class, factory, agent or `reset`."
    )
    max_turns: PositiveInt | None = None
    """Largest number of model turns of an episode; if unset 8 (`multi_turn`) or no bound (`gym`, `mcp`, `openenv`)."""
    on_timeout: Literal["retry", "score"] = "retry"
    """After `sampling.timeout_s` a sample is repeated, then its group, or (`score`) scored: by its rewards so far
    (`multi_turn`), else by the configured reward of its last answer. Not of `custom`."""
    tool_parser: str | None = None
    """One of vLLM's tool parsers (`hermes`, ...), or `file.py:Class` of your own; if unset, tools are refused."""
    python: str | None = Field(None, description="Interpreter of the workers; this one if unset.")
    workers: PositiveInt = Field(1, description="Processes; each runs many samples at a time.")
    memory_gib: PositiveFloat | None = None
    """A worker with more resident memory, its children's too, is restarted; its samples are repeated."""

    @property
    def calls_endpoint(self) -> bool:
        """Whether its completions come from the agents' endpoint, by the requests of its code."""
        return self.kind not in ("multi_turn", "custom")

    @model_validator(mode="after")
    def _names_its_code(self) -> Self:
        needed = {"agent": "path", "custom": "path"}.get(self.kind, "env")
        if [key for key in ("path", "env") if getattr(self, key)] != [needed]:
            raise ValueError(f"kind {self.kind} needs {needed}, and no other of path and env: set it alone")
        if self.env and isinstance(self.env, list) != (self.kind == "mcp"):
            raise ValueError("env is a list for kind mcp, [python tools.py], and a text for the other kinds")
        if self.kind == "openenv" and not str(self.env).startswith(("http://", "https://")):
            raise ValueError("kind openenv needs the URL of a server in env, such as http://127.0.0.1:8000")
        if self.on_timeout == "score" and self.kind == "custom":
            raise ValueError("kind custom has no part that could be scored: bound the time in its code")
        if self.args and self.kind == "mcp":
            raise ValueError("kind mcp has no args: write them into the commands of env")
        if self.max_turns and self.kind in ("agent", "custom", "verifiers"):
            raise ValueError(f"kind {self.kind} has turns of its own: bound them in its code, and leave max_turns out")
        if self.tool_parser and not self.calls_endpoint:
            raise ValueError(f"kind {self.kind} has no requests with tools: leave tool_parser out")
        return self


class ClientWorkflowConfig(Section):
    """A client of the service drives the adapter: no task, no rollouts, no steps of its own."""

    kind: Literal["client"] = "client"
    calls_endpoint: ClassVar[bool] = False


WorkflowConfig = Annotated[
    SingleTurnWorkflowConfig | WorkerWorkflowConfig | SkipJsonSchema[ClientWorkflowConfig], Field(discriminator="kind")
]


DEFAULT_SET = "held-out"
"""Name of the set of an adapter that configures none."""


class EvalSetConfig(Section):
    name: str = Field(pattern=NAME, description="Name of the set in records, plots and TensorBoard tags.")
    task: TaskConfig | None = None
    """The set has the held-out split of this task; of the adapter's own task if unset."""
    workflow: Literal["trained", "single_turn"] = "trained"
    """`trained`: the adapter's workflow, an agent as an agent; `single_turn`: one answer."""
    n_samples: PositiveInt = 1
    """Answers per problem; with several there are pass@k and majority@k, and `temperature` is not 0."""
    temperature: NonNegFloat = Field(0.0, description="Divides the logits; 0: greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens with this share of the probability."""
    max_new_tokens: PositiveInt | None = Field(None, description="Longest answer; `sampling.max_new_tokens` if unset.")
    n: PositiveInt | None = Field(None, description="Use only so many problems, the first ones.")
    correct_threshold: float | None = Field(None, allow_inf_nan=False)
    """Smallest reward of a correct answer where neither reward nor workflow states what is correct. Unset: there is a
    mean reward and no accuracy."""

    @model_validator(mode="before")
    @classmethod
    def _trains_on_nothing(cls, data: Any) -> Any:
        """Only held-out rows of a set's data set are read, so ``train`` may be left out."""
        task = data.get("task") if isinstance(data, Mapping) else None
        if isinstance(task, Mapping) and task.get("kind") == "dataset":
            return {**data, "task": {"train": "", **task}}
        return data

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if isinstance(self.task, DatasetTask) and self.task.eval is None:
            raise ValueError("a set has held-out rows only: add task.eval")
        return self


ONE, SEVERAL, NAMED, SECTION, USER = TAGS = "(one)", "(several)", "(named)", "(section)", "(user)"
"""Tags of spellings in pydantic's locations; no key is called so."""


class BuiltInReward(Section):
    """A reward of the package. Every kind is computed in killable child processes (`tasks.scorer_setup`)."""

    kind: Literal["numeric_match", "math_verify", "none"] = "numeric_match"
    """The last number is the answer's, or Math-Verify finds both equal; `none`: always 0."""
    timeout_s: ClassVar[float] = 60.0
    """Seconds for one answer, of a machine that is busy: CPU time ends those on which Math-Verify does not end."""

    @property
    def workers(self) -> int:
        """Scorer processes: an answer on which Math-Verify does not end delays those behind it."""
        return 2 if self.kind == "math_verify" else 1


BUILT_IN = get_args(BuiltInReward.model_fields["kind"].annotation)


class FunctionReward(Section):
    kind: Literal["function"] = "function"
    path: str
    """`package.module:name` or `file.py:name` of `reward(completion, answer)`; it returns a number, a bool, or
    `{"reward": number, "correct": bool}`."""
    timeout_s: PositiveFloat = Field(5.0, description="Seconds for one answer; after that a `timeout`, never reward 0.")
    workers: PositiveInt = Field(1, description="Scorer processes.")
    network: bool = Field(False, description="Let the function open sockets, for example to query a judge.")
    allow_subprocess: bool = Field(False, description="Let the function start processes, in bubblewrap where usable.")


class ServedReward(ServedModel):
    """A reward by a model that others serve."""

    timeout_s: ClassVar[float] = 180.0
    """Seconds for one answer, with all attempts."""
    workers: ClassVar[int] = 2
    """Scorer processes; each scores the answers of one group at a time."""


class JudgeReward(ServedReward):
    kind: Literal["judge"] = "judge"
    prompt: str
    """The question; `{completion}`, `{prompt}`, `{answer}`, `{conversation}` and columns are replaced. The reply's last
    `Score: n`, also as JSON, is the score: 0 to 10, which become reward 0 to 1. Other scores are refused."""
    parameters: dict[str, Any] = Field({})
    """Further fields of the request, over `temperature: 0` and `max_tokens: 512`; null omits one."""


class ModelReward(ServedReward):
    kind: Literal["model"] = "model"
    url: str = Field(pattern=r"^https?://.*/(classify|score|pooling)$")
    """URL of vLLM's `.../classify`, `.../score` or `.../pooling`."""
    input: str | None = None
    """Text that is scored, filled in like a judge's `prompt`; unset: the chat, for `score` the answer alone."""
    label: NonNegInt = Field(0, description="Class whose score, a logit, is the reward.")


class CodeReward(Section):
    kind: Literal["code"] = "code"
    inputs: str | None = Field(None, description="Column with the standard inputs of the tests: a text, or a list.")
    outputs: str | None = Field(None, description="Column with the expected standard outputs, one per input.")
    asserts: str | None = None
    """Column with Python code, or a list of pieces, that runs after the answer's program."""
    workers: PositiveInt = Field(1, description="Scorer processes.")
    credit: Literal["all", "partial"] = "all"
    """`all`: 1 if every test passes, else 0. `partial`: the share of tests that pass."""
    timeout_s: PositiveFloat = Field(60.0, description="Seconds for all tests of one answer; further tests fail.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.outputs is None and self.asserts is None:
            raise ValueError("there are no tests: name a column in outputs, asserts or both")
        if self.inputs is not None and self.outputs is None:
            raise ValueError("inputs without outputs test nothing: name the column of the expected outputs")
        return self


RewardConfig = Annotated[
    BuiltInReward | FunctionReward | JudgeReward | ModelReward | CodeReward, Field(discriminator="kind")
]


RewardsConfig = Annotated[
    Annotated[RewardConfig, Tag(ONE)] | Annotated[list[RewardConfig], Field(min_length=1), Tag(SEVERAL)],
    Discriminator(lambda value: SEVERAL if isinstance(value, list) else ONE),
]


def labels(rewards: list[RewardConfig]) -> list[str]:
    """Names of the rewards in the metrics: the function's or the kind, numbered from the second such; of one: empty."""
    if len(rewards) == 1:
        return [""]
    names = [r.path.rpartition(":")[2] if isinstance(r, FunctionReward) else r.kind for r in rewards]
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [f"{name}-{count}" if count > 1 else name for name, count in zip(names, counts, strict=True)]


def reward_keys(at: str, rewards: RewardsConfig) -> list[tuple[str, RewardConfig]]:
    """The rewards of the adapter below ``at`` (empty, or with a dot at the end) with the key of each."""
    if isinstance(rewards, list):
        return [(f"{at}reward.{i}", reward) for i, reward in enumerate(rewards)]
    return [(f"{at}reward", rewards)]
