"""Settings of the server manager."""

from __future__ import annotations

from dataclasses import dataclass

from roll_async.config.schema import PipelineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagerOptions:
    """The part of the config that the manager uses. Times in seconds of the loop."""

    max_concurrent_per_server: int = 128
    admission: str = "fixed"
    """`kv`: fewer than that where the KV cache of a replica has no room for more (`admission.py`)."""
    generation_timeout_s: float = 3600.0
    request_retries: int = 3
    interrupt_timeout_s: float = 30.0
    """A replica that takes longer to acknowledge an abort or a resume, or to report its load, is lost."""
    silence_s: float = 30.0
    """A replica that runs requests and reports no token for this long is suspect; replicas report every 5 s."""
    batch_creation_interval_s: float = 0.0
    """Greatest age of the load information used for dispatch; no request is held back for it."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end every answer, whatever its replica would stop at by itself: `prompts/end_marks.py`."""

    @classmethod
    def of(cls, config: PipelineConfig) -> ManagerOptions:
        """How requests reach replicas, as the config has it."""
        a = config.async_training
        return cls(
            max_concurrent_per_server=a.max_concurrent_per_server,
            admission=a.admission,
            generation_timeout_s=a.generation_timeout,
            request_retries=config.fault.request_retries,
            interrupt_timeout_s=a.interrupt.timeout,
            batch_creation_interval_s=a.batch_creation_interval,
        )
