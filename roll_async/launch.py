"""From a checked config to running roles: the only place that knows every folder.

    config -> Ray -> prompts, rewards, trainer, reference, critic, engines -> queue, scheduler, rollouter -> pipeline
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from roll_async.buffer.message_queue import MessageQueue
from roll_async.cluster.engine_group import RayEngineClient
from roll_async.cluster.placement import NodePool, ProcessPlacement, place, threads_per_process
from roll_async.cluster.reward_group import RayScorer
from roll_async.cluster.runtime import RuntimeInfo, ray_runtime
from roll_async.cluster.trainer_group import RayTrainerGroup, TrainingRole
from roll_async.config.schema import RLVRConfig, WorkerConfig

logger = logging.getLogger(__name__)
