"""Python runs this file when it starts in an engine's process: its `system_envs` put this folder on PYTHONPATH."""

from roll_async.inference.backends import ENGINES

ENGINES["hf_infer"] = "recording_engine.RecordingEngine"
