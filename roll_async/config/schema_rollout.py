"""Rewards, environments and validation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from roll_async.config.fields import bounded, derived, required, section
from roll_async.config.schema_worker import DataArguments, GeneratingArguments

REWARDS = {
    "math_rule": "roll_async.rewards.math_rule.MathRule",
    "math_service": None,  # a client in the router, as is llm_judge
    "code_sandbox": "roll_async.rewards.code_sandbox.CodeSandbox",
    "llm_judge": None,
    "ifeval": "roll_async.rewards.ifeval.InstructionFollowing",
    "ifeval_strict": "roll_async.rewards.ifeval.StrictInstructionFollowing",
    "multiple_choice": "roll_async.rewards.multiple_choice.MultipleChoice",
    "qa": "roll_async.rewards.qa.QuestionAnswer",
    "exact_match": "roll_async.rewards.exact_match.ExactMatch",
    "supervised": None,  # scores nothing, as distilled
    "distilled": None,
}
"""Name of a reward to its class or function, which judges in worker processes."""
MATHS_RULES = ("math_rule", "math_service")
"""Rewards that compare numbers and expressions."""
LOSS_PARTS = {"supervised": "cross_entropy", "distilled": "reference_kl"}
"""Types that score nothing: their rows feed another part of the loss than the policy's."""
ANSWER_READERS = ("math_rule", "math_service", "multiple_choice", "qa", "exact_match")

WORLDS = {
    "frozen_lake": "roll_async.envs.worlds.frozen_lake.FrozenLake",
    "sokoban": "roll_async.envs.worlds.sokoban.Sokoban",
    "countdown": "roll_async.envs.worlds.countdown.Countdown",
    "math": "roll_async.envs.worlds.questions.Questions",
    "qa": "roll_async.envs.worlds.questions.Questions",
    "text_game": "roll_async.envs.worlds.text_game.TextGame",
    "gymnasium": "roll_async.envs.wrappers.any_gymnasium.GymnasiumWorld",
    "minigrid": "roll_async.envs.wrappers.any_minigrid.MinigridWorld",
    "textarena": "roll_async.envs.wrappers.any_textarena.TextArenaWorld",
    "reasoning_gym": "roll_async.envs.wrappers.any_reasoning_gym.ReasoningGymWorld",
    "command": "roll_async.agents.processes.external.CommandAgent",
    "http_agent": "roll_async.agents.processes.external.HttpAgent",
    "webshop": None,  # names of ROLL's files, refused with what there is instead
    "code": None,
}
"""`env_type` to the class of a world or an agent. Wrappers need their extra (`roll_async[minigrid]`, ...)."""

MAIN_SET = "main"
"""What the results of `roll-async eval` call the set that has no name in the config."""


def reads_answers(reward_type: str) -> bool:
    """Whether the reward reads a stated answer, and obeys `answer_format`."""
    return reward_type in ANSWER_READERS or reward_type.startswith("roll_async.rewards.")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeConfig:
    """A model that scores, behind an OpenAI-compatible endpoint."""

    api_url: str = required()
    """Base URL."""
    model: str = required()
    """Model name."""
    api_key_env: str | None = None
    """Name of the environment variable with the key, read by the reward worker; null = none."""
    prompt: str | None = None
    """Instruction of the judge, with {question}, {reference} and {response}; null = the built-in one."""
    max_concurrent: int = bounded(32, ">= 1")
    """Requests at the same time."""
    max_retries: int = bounded(3, ">= 0")
    """Further attempts of one request, with backoff; after them it is an outage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxConfig:
    """Where generated code runs."""

    api_url: str | None = None
    """Sandbox service; null = a local process."""
    memory_mb: int = bounded(1024, ">= 1")
    """MiB of address space of one program."""
    case_timeout: float = bounded(6.0, "> 0")
    """Seconds of one test case; all cases of a sample share `timeout`."""
    scoring: Literal["all", "fraction"] = "all"
    """Score 1 only if every case passes, or the share of cases that pass."""
    prelude: bool = True
    """Run the imports of the field's evaluators (docs_roll/rewards.md) before each program."""
    isolation: Literal["required", "best_effort"] = "required"
    """Where programs cannot be contained (macOS, Linux before 5.13): refuse, or run them with resource limits only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """A math verify service (`examples/async_dapo/math_verify_service.py`)."""

    api_url: str = required()
    """Base URL, e.g. http://127.0.0.1:8300."""
    token_env: str | None = None
    """Name of the environment variable with the token; null = none."""
    max_concurrent: int = bounded(64, ">= 1")
    """Requests at the same time."""
    max_retries: int = bounded(5, ">= 0")
    """Further attempts of one request, with backoff; after them it is an outage, which the rollout waits out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """Scorer of one domain."""

    type: str = derived()
    """math_rule, math_service, code_sandbox, llm_judge, ifeval, ifeval_strict, multiple_choice, qa, exact_match, or a
    dotted path; default: the domain's name. Without a score: supervised (nothing is sampled, the ground truth is
    trained on), distilled (sampled, and trained on the KL to `reference` alone)."""
    tag_included: tuple[str, ...] = section(tuple)
    """Data set tags routed here; a single domain takes all."""
    style_included: tuple[str, ...] = section(tuple)
    """Values of verl's `reward_model.style` (rule, model, ...) routed here, of the tags above if there are any; empty =
    all. With it two domains may share a tag."""
    num_workers: int = bounded(1, ">= 1")
    """CPU processes."""
    timeout: float = bounded(30.0, "> 0")
    """Seconds per sample."""
    answer_format: Literal["auto", "boxed", "answer_line", "hashes", "tag", "the_answer_is", "last_number"] = "auto"
    """Where a response states its answer (docs_roll/rewards.md); auto = a box, else `####`, `<answer>`, `Answer:`, else
    "the answer is". For rewards that read one."""
    judge: JudgeConfig | None = None
    """llm_judge only."""
    sandbox: SandboxConfig | None = None
    """code_sandbox only."""
    service: ServiceConfig | None = None
    """math_service only."""

    @property
    def loss_part(self) -> str:
        """Part of the loss that the rows of this domain feed: policy, cross_entropy or reference_kl."""
        return LOSS_PARTS.get(self.type, "policy")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPoolConfig:
    """Which prompts are asked again: by past pass rate, retired when solved, refilled, easy ones first."""

    enable: bool = False
    """Off: the shuffled stream, every prompt once an epoch."""
    metric: str = "score"
    """Number of a sample in [0, 1] that says whether it is solved: score, acc, or any number the reward reports."""
    floor: float = bounded(0.1, "in (0, 1]")
    """Weight of a prompt that is always or never solved; one of pass rate p has max(this, 4 p (1 - p)), a new one 1."""
    retire_after: int = bounded(0, ">= 0")
    """Visits in a row that must solve a prompt before it is asked no more; 0 = never."""
    retire_at: float = bounded(1.0, "in (0, 1]")
    """Mean of the metric over the group from which a visit solved the prompt."""
    refill_below: float = bounded(0.5, "in (0, 1]")
    """Refill when fewer than this share of a domain's prompts are left."""
    refill_file_name: tuple[str, ...] = section(tuple)
    """Prompt files of the reserve, with the columns of actor_train.data_args."""
    curriculum_column: str | None = None
    """Column with a number, the difficulty; null = no curriculum."""
    curriculum_prompts: int = bounded(0, ">= 0")
    """Prompts over which the curriculum opens from the easiest to all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolConfig:
    """A tool the agent may call."""

    tool_id: str = required()
    """Name of the tool."""
    tool_args: Mapping[str, object] = section(dict)
    """Its arguments, checked by the tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    """One world."""

    env_type: str = required()
    """frozen_lake, sokoban, countdown, math, qa, text_game, gymnasium, minigrid, textarena, reasoning_gym; command or
    http_agent, an agent in a process of its own; or a dotted path to a world or an agent."""
    manager: Literal["traj", "step"] = "traj"
    """One sample per trajectory, or per turn."""
    max_steps: int = bounded(10, ">= 1")
    """Turns of a trajectory."""
    max_seconds: float = bounded(0.0, ">= 0")
    """Seconds of a trajectory from its first turn, after which nothing more is sampled; 0 = no limit."""
    max_tokens_per_step: int = derived(">= 1")
    """Tokens of one turn, max_new_tokens at most, which is the default."""
    agent_system_template: str | None = None
    """System message, with the placeholders of docs_roll/agentic.md; null = the world's own."""
    agent_template: str | None = None
    """Message of each turn, with the same placeholders; null = the world's observation."""
    history_length: int = bounded(0, ">= 0")
    """Turns shown to the model, 0 = all; step only."""
    max_concurrent: int = bounded(0, ">= 0")
    """Worlds of this tag at the same time; 0 = no cap."""
    env_config: Mapping[str, object] = section(dict)
    """Settings of the world, checked by its own dataclass before any model is loaded."""
    tools: tuple[ToolConfig, ...] = section(tuple)
    """Tools the agent may call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvManagerConfig:
    """How trajectories are grouped."""

    group_size: int = bounded(1, ">= 1")
    """Trajectories from one start; 8 in training, 1 in validation."""
    group_size_redundancy: int = bounded(0, ">= 0")
    """Extra trajectories per group; the first group_size are kept."""
    num_env_groups: int = derived(">= 1")
    """Groups at the same time; default: one batch of groups."""
    tags: tuple[str, ...] = section(tuple)
    """Worlds used, by tag; default: all of custom_envs."""
    num_groups_partition: tuple[int, ...] = derived(">= 0")
    """Groups of each tag; default: even."""
    max_env_num_per_worker: int = bounded(16, ">= 1")
    """Worlds in one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainEnvManagerConfig(EnvManagerConfig):
    """`EnvManagerConfig` with the default group size of training."""

    group_size: int = bounded(8, ">= 1")
    """Trajectories from one start; 8, because group-relative estimators need a spread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValEnvManagerConfig(EnvManagerConfig):
    """`EnvManagerConfig`, and what waits for a validation of worlds."""

    mode: Literal["pause", "share", "replicas"] = "pause"
    """As `validation.mode` of rlvr configs."""
    num_replicas: int = bounded(1, ">= 1")
    """As `validation.num_replicas` of rlvr configs."""
    generating_args: GeneratingArguments | None = None
    """Sampling of validations, temperature 0 = greedy, num_return_sequences n = avg@n; null = that of training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationSetConfig:
    """One more held-out set, or the same prompts sampled in another way."""

    data_args: DataArguments | None = None
    """Prompt files; null = those of `validation.data_args`."""
    generating_args: GeneratingArguments = section(GeneratingArguments)
    """Sampling of this set; num_return_sequences n gives avg@n and pass@k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """Held-out prompts and how they are sampled."""

    data_args: DataArguments = required()
    """Held-out prompt files of the main set."""
    generating_args: GeneratingArguments = section(GeneratingArguments)
    """Sampling of the main set; temperature 0 = greedy."""
    sets: Mapping[str, ValidationSetConfig] = section(dict, form="names")
    """More sets by name, measured together with the main one; their metrics are `validation/sets/NAME/...`."""
    mode: Literal["pause", "share", "replicas"] = "pause"
    """pause: trainer and training requests wait for it; share: it uses the slots that no training request wants, and
    requests left at the next push run before it; replicas: it has replicas of its own, and nothing waits for it."""
    num_replicas: int = bounded(1, ">= 1")
    """With mode replicas: so many of actor_infer's replicas, the last ones, run validations and nothing else."""

    @property
    def data(self) -> Mapping[str, tuple[str, DataArguments]]:
        """Set to (config key, its prompt files); the main set has no name."""
        found = {"": ("validation.data_args", self.data_args)}
        for name, more in self.sets.items():
            own = None if more.data_args is None else (f"validation.sets.{name}.data_args", more.data_args)
            found[name] = own or found[""]
        return found

    @property
    def sampling(self) -> Mapping[str, tuple[str, GeneratingArguments]]:
        """Set to (config key, its sampling)."""
        more = {n: (f"validation.sets.{n}.generating_args", s.generating_args) for n, s in self.sets.items()}
        return {"": ("validation.generating_args", self.generating_args), **more}

    def with_files(self, place: Callable[[str], str]) -> "ValidationConfig":
        """A copy in which every prompt file is the one that `place` gives for it."""

        def placed(data: DataArguments) -> DataArguments:
            return replace(data, file_name=tuple(map(place, data.file_name)))

        sets = {
            name: more if more.data_args is None else replace(more, data_args=placed(more.data_args))
            for name, more in self.sets.items()
        }
        return replace(self, data_args=placed(self.data_args), sets=sets)
