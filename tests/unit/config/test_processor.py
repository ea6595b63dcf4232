"""Precision follows what the processor computes by itself."""

import argparse
import json

import pytest

from roll_async.config import processor
from roll_async.config.api import load_with_warnings
from tools.machine import machine_line

NATIVE = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 fma\n"
PLAIN = "processor\t: 0\nflags\t\t: fpu avx2 avx512f fma\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


def test_the_instructions_are_read_from_what_linux_tells():
    assert "avx512_bf16" in processor.flags(NATIVE) and "bf16" in processor.flags(ARM)
    assert processor.flags(PLAIN) == ["fpu", "avx2", "avx512f", "fma"] and processor.flags("") == []


@pytest.mark.parametrize(("cpuinfo", "native"), [(NATIVE, True), (ARM, True), (PLAIN, False), ("", False)])
def test_bf16_is_native_where_the_processor_has_instructions_for_it(monkeypatch, cpuinfo, native):
    monkeypatch.setattr(processor, "cpuinfo", lambda: cpuinfo)
    assert processor.multiplies_bf16() is native


def test_a_measurement_begins_with_the_processor_and_the_settings():
    line = json.loads(machine_line(argparse.Namespace(steps=3, run=print)))
    assert line["name"] == "machine" and line["settings"] == {"steps": 3}
    assert line["cores"] >= 1 and line["cpu"] and line["torch"] and line["bf16"] in ("native", "emulated")


@pytest.fixture(params=[True, False], ids=["native", "emulated"])
def native(request, monkeypatch):
    monkeypatch.setattr(processor, "multiplies_bf16", lambda: request.param)
    return request.param


ON_CPU = {"actor_train.device_mapping": None, "actor_infer.device_mapping": None}


def test_a_run_on_cpus_takes_bf16_where_the_cpu_has_it(files, native):
    loaded = load_with_warnings(files.rlvr(ON_CPU))
    wanted = "bf16" if native else "fp32"
    assert {worker.model_args.dtype for _, worker in loaded.config.roles()} == {wanted}
    assert not [w for w in loaded.warnings if w.id == "W13"]


def test_a_run_on_devices_takes_bf16_whatever_the_cpu_has(files, native):
    config = load_with_warnings(files.rlvr({})).config
    assert {worker.model_args.dtype for _, worker in config.roles()} == {"bf16"}


def test_bf16_that_the_cpu_emulates_is_warned_of(files, native):
    loaded = load_with_warnings(files.rlvr({**ON_CPU, "actor_train.model_args": {"dtype": "bf16"}}))
    found = [str(w) for w in loaded.warnings if w.id == "W13"]
    assert len(found) == (0 if native else 1)
    assert native or "actor_train.model_args.dtype: bf16 is emulated by this CPU" in found[0]
