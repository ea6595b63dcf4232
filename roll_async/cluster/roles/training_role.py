"""What a rank process is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from roll_async.config.schema import PipelineConfig, RunConfig, WorkerConfig
from roll_async.inference.settings import EngineSettings
from roll_async.trainer.megatron.settings import MegatronSettings
from roll_async.weight_sync.bucket import STAGED
from roll_async.weight_sync.layout import EngineLayout
from roll_async.weight_sync.transport.transports import needs_front_end


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRole:
    """All that a rank process needs to build its worker."""

    name: str
    """actor_train, critic, reference or teacher."""
    settings: MegatronSettings
    bucket_bytes: int = 1 << 30
    """Largest total size of the blocks of a weight bucket, one per rank."""
    engine_tensor_parallel: int = 1
    """Tensor-parallel ranks of an engine that receive their parts of the weights."""
    engine_stages_whole: bool = False
    """Over transports of host memory the engine's front end receives whole tensors instead."""
    engine_expert_parallel: bool = False
    """Whether the engines spread whole experts over those ranks."""
    weights_folder: str | None = None
    """Folder of the files of weight_sync.transport filesystem."""

    @classmethod
    def of(cls, config: RunConfig, name: str, worker: WorkerConfig) -> TrainingRole:
        """One training role, as the config has it."""
        if not isinstance(config, PipelineConfig):
            return cls.alone(config, name, worker)
        engine = EngineSettings.of(config, replica=0, restart=0)  # the same for all of them
        return cls(
            name=name,
            settings=MegatronSettings.of(config, worker),
            bucket_bytes=config.weight_sync.bucket_size_mb << 20,
            rpc_timeout_s=config.fault.rpc_timeout,
            engine_tensor_parallel=engine.tensor_parallel_size if needs_front_end(config) is None else 1,
            engine_stages_whole=not config.actor_infer.engine.traits.receives_parts,
            engine_expert_parallel=bool(engine.extra.keys() & {"enable_expert_parallel", "ep_size"}),
            weights_folder=str(Path(config.output_dir).resolve() / config.exp_name / "weights"),
        )

    @classmethod
    def alone(cls, config: RunConfig, name: str, worker: WorkerConfig) -> TrainingRole:
        """Of a run without engines: nothing is pushed."""
        settings = MegatronSettings.of(config, worker)
        return cls(name=name, settings=settings, rpc_timeout_s=config.fault.rpc_timeout)

    rpc_timeout_s: float
    """Seconds of one call, the start included."""

    def engine_layout(self, transport: str, num_kv_heads: int) -> EngineLayout:
        """Which parts of the model the receivers of a push take."""
        whole = self.engine_stages_whole and transport in STAGED
        return EngineLayout(
            tensor=1 if whole else self.engine_tensor_parallel,
            num_kv_heads=num_kv_heads,
            expert_parallel=self.engine_expert_parallel,
        )
