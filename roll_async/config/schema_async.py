"""async_training and the sections about moving, keeping and showing things. Times in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from roll_async.config.fields import bounded, derived, option, section


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessConfig:
    """How old a trained token may be. Staleness = training step - 1 - weight version that sampled the token: step t
    updates the weights of version t - 1."""

    max_versions: int = derived(">= 0")
    """Hard bound in weight versions: no older token is trained; default: staleness_bound, with over-sampling
    (gen_batch_size) more, up to 8."""
    policy: Literal["wait", "drop", "token_mask"] = "wait"
    """Over the bound: the trainer waits so that it never happens; the group is discarded; the tokens leave the loss."""
    soft_versions: int | None = bounded(None, ">= 0")
    """Older samples count as stale in metrics, and no new group starts while one is waiting; null = off."""
    max_age_s: float | None = bounded(None, "> 0")
    """A finished group admitted more seconds ago, when a step would take it, is discarded under every policy and its
    prompt generated again; must be above the time of the longest answer. null = off.
    """
    allow_above_8: bool = False
    """Needed when max_versions exceeds 8, where training is known to degrade."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptConfig:
    """Requests in flight when new weights arrive."""

    mode: Literal["wait", "abort", "resume", "keep"] = "resume"
    """Finish first; discard and requeue; keep the tokens and re-prefill; continue in place with the KV cache."""
    timeout: float = bounded(30.0, "> 0")
    """Seconds within which the engines must have paused, and between pushes answer a heartbeat; a stop waits so long
    for groups, then cuts them short."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncTrainingConfig:
    """How far generation may run ahead of training, and how it is scheduled."""

    staleness: StalenessConfig = section(StalenessConfig)
    """Freshness bound."""
    interrupt: InterruptConfig = section(InterruptConfig)
    """What a weight push does to running requests."""
    trigger_parameter_sync_step: int = bounded(1, ">= 1")
    """Training steps per weight push."""
    require_batches: int = derived(">= 1")
    """Optimizer mini-batches that must be ready before the trainer starts a step; 1 = stream; default: all."""
    max_queue_size: int = derived(">= 1")
    """Finished groups waiting; when full, generation pauses, nothing is evicted; default: ceil((1 + r) * W)."""
    batch_timeout: float = bounded(30.0, "> 0")
    """Seconds the trainer waits for a batch before it reports whom it waits for."""
    generation_timeout: float = bounded(3600.0, "> 0")
    """Seconds of one request without finishing; then it is dispatched elsewhere with its tokens."""
    batch_creation_interval: float = bounded(0.1, ">= 0")
    """Seconds for which one division of new requests among the replicas holds, and between two questions for the load
    of a replica that others use; delays no request."""
    max_concurrent_per_server: int = bounded(128, ">= 1")
    """Requests running on one engine replica, at most."""
    admission: Literal["kv", "fixed"] = "kv"
    """Requests that a replica runs: as many as its KV cache will hold to their ends, by the answers seen so far, where
    its engine tells of its cache; or always max_concurrent_per_server."""
    max_sync_retries: int = bounded(3, ">= 0")
    """Further attempts per weight push."""
    sync_timeout: float = bounded(300.0, "> 0")
    """Seconds of one attempt."""
    sync_retry_delay: float = bounded(1.0, ">= 0")
    """Seconds before the next attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncConfig:
    """How weights travel from trainer to engines."""

    transport: Literal["auto", "cuda_ipc", "nccl", "shm", "gloo", "filesystem"] = "auto"
    """auto = chosen from the device mapping."""
    bucket_size_mb: int = bounded(1024, ">= 1")
    """MiB per bucket; two are in use."""
    verify: Literal["full", "sample", "none"] = "sample"
    """Digest an engine must prove before it serves a version: of all bytes, of a sample, none."""
    sparse: Literal["auto", "on", "off"] = "auto"
    """Send only the values that changed, to engines that hold the version before: auto = over a network (gloo,
    filesystem). Each trainer rank and engine rank keeps a copy of what it sent or received in host memory.
    """
    adapters: Literal["auto", "alone", "merged"] = "auto"
    """LoRA: alone = engines hold adapters beside frozen weights, which travel once, then a push is the adapters.
    merged = the trainer adds them, and all weights travel each time. auto = alone on CPU, where engine and model allow.
    """
    canary_prompts: int = bounded(16, ">= 0")
    """Heads of prompts (agentic: of the first trained batch) that engines and trainer score after each push, with one
    row as long as the context, up to 8192 tokens, to see that they compute the same; 0 = none.
    """
    canary_band: float | None = bounded(None, "> 0")
    """Mean difference of log-probs in nats that is no mismatch, at every depth; default: by dtype, 0.001 fp32, 0.03
    fp16, 0.1 bf16 and fp8.
    """
    on_mismatch: Literal["warn", "stop"] = "warn"
    """What an engine beyond the band does to the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerConfig:
    """Durable log of finished groups."""

    enable: bool = True
    """false: a crash loses the groups that were waiting."""
    path: str = derived()
    """SQLite file; default: output_dir/exp_name/ledger.sqlite."""
    fsync: Literal["group", "step", "never"] = "group"
    """When a commit must reach the disk; per group survives a power failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where checkpoints go and come from."""

    output_dir: str = derived()
    """Folder; default: output_dir/exp_name/checkpoints."""
    resume_from: str | None = None
    """`latest` or a folder; null = start anew."""
    max_to_keep: int = bounded(0, ">= 0")
    """Checkpoints kept; 0 = all."""
    save_hf_model: bool = False
    """Also write HF weights."""
    async_save: bool = True
    """Write in the background."""


TrackerName = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio", "stdout"]
TRACKER_NAMES: tuple[str, ...] = get_args(TrackerName)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """Where metrics, traces and samples go."""

    track_with: tuple[TrackerName, ...] = section(lambda: ("tensorboard",), form="one or more")
    """Trackers, which get every metric each; [] = none, only metrics.jsonl. tensorboard and stdout need no account."""
    tracker_kwargs: Mapping[str, object] = section(dict)
    """Handed to every tracker: project, name, tags; under the name of a tracker, what only that one gets."""
    trace: bool = True
    """Perfetto trace under output_dir."""
    prometheus_port: int | None = option(None, range="in [1, 65535]")
    """Port of the metrics endpoint; null = none."""
    alarms: Mapping[str, float] = section(dict)
    """Largest value of a metric by its key, as fully_async/stale_samples_ratio: a step above it is a warning on the
    console and in the log.
    """
    samples_per_step: int = bounded(4, ">= 0")
    """Groups of each step whose samples are kept in samples/ of the run's folder: the best, the worst, others between
    them. 0 = none.
    """
    samples_every: int = bounded(10, ">= 0")
    """Steps between two panels with a prompt, its best and its worst answer, on the screen and to the trackers; the
    first step of a start has one, too. 0 = none.
    """
    rollout_dump_dir: str | None = None
    """Folder for all trained samples as JSONL; null = none."""

    def kwargs_of(self, tracker: str) -> dict[str, object]:
        """What one tracker is handed: the keys for all, then those under its own name, which win."""
        own = self.tracker_kwargs.get(tracker, {})
        assert isinstance(own, Mapping), "checked by the loader"
        return {key: value for key, value in self.tracker_kwargs.items() if key not in TRACKER_NAMES} | dict(own)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPolicy:
    """Limits on the failures that a run tolerates."""

    stall_timeout: float = bounded(1800.0, "> 0")
    """Seconds without progress at any wait: report who waits for whom, end the run."""
    rpc_timeout: float = bounded(3600.0, "> 0")
    """Seconds of one remote call, a start or a save included; must be longer than a step. Then the run ends."""
    env_timeout: float = bounded(600.0, "> 0")
    """Seconds of one environment step, or of an agent without a request; then the trajectory is restarted."""
    request_retries: int = bounded(3, ">= 0")
    """Attempts of a request on another replica."""
    sample_retries: int = bounded(2, ">= 0")
    """Attempts of a sample after a failed reward or environment, with backoff."""
    max_engine_restarts: int = bounded(3, ">= 0")
    """Per replica."""
    max_run_restarts: int = bounded(0, ">= 0")
    """Restarts of all roles from the newest checkpoint after a trainer rank or the rollout process has died."""
    max_failed_groups: int = bounded(100, ">= 0")
    """Quarantined groups before the run ends."""
