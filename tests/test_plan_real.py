"""One plan for GPUs and one for TPUs, for real, by the command that a user types.

The model is small, the program is not: the real compilers, the real number of devices. Larger ones
are in scripts/plan_suite.sh.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planning import needs_cuda, needs_tpu

ROOT = Path(__file__).parents[1]
FLAGS = ("--model=llama3.2-1b", "--model.num_layers=2", "--precision=bfloat16")
# The TPU compiler takes a minute and more for wide layers.
SMALL = (
    *("--model.embed_dim=512", "--model.num_heads=4", "--model.num_kv_heads=4"),
    "--model.mlp_dim=1024",
)


def planned(directory, *words, code=0):
    """(plan.json, what was printed) of a process that may not see any device but the CPU."""
    command = [sys.executable, "experiments/train_lm.py", f"--workdir={directory}", *FLAGS, *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert (directory / "plan.html").stat().st_size > 10_000
    return json.loads((directory / "plan.json").read_text()), ended.stdout


@needs_cuda
def test_a_plan_for_gpus(tmp_path):
    plan, text = planned(
        tmp_path, "--plan=h100:2x8", "--mesh=fsdp:8,tensor:2", "--global_batch_size=16",
        "--data.sequence_length=2048", "--remat=full",
    )  # fmt: skip
    assert plan["fits"]
    assert plan["fused_attention"]
    assert plan["num_devices"] == 16
    assert sum(plan["memory"].values()) == pytest.approx(plan["peak_bytes_per_device"], rel=0.02)
    # The gathers of fsdp cross hosts, the sums of tensor do not.
    assert {"fsdp", "tensor"} <= plan["communication"].keys()
    assert 0.001 < plan["step_seconds"] < 1
    assert 0.05 < plan["mfu"] < 0.7
    assert not [w for w in plan["warnings"] if w["kind"] in ("slow_link", "involuntary_remat")]
    assert "flags: --mesh=fsdp:8,tensor:2" in text


@pytest.mark.long
@needs_cuda
def test_a_search_for_gpus(tmp_path):
    plan, text = planned(
        tmp_path, "--plan=a100-80:1x2", "--mesh=auto", "--global_batch_size=4",
        "--data.sequence_length=2048",
    )  # fmt: skip
    assert plan["fits"]
    assert plan["min_hosts"] == 1
    assert 3 <= len(plan["ranking"]) <= 5
    steps = [ranked["step_seconds"] for ranked in plan["ranking"] if ranked["fits"]]
    assert steps == sorted(steps)
    assert plan["ranking"][0]["flags"] == plan["flags"]
    assert "is the fastest" in text


@needs_tpu
def test_a_plan_for_tpus(tmp_path):
    plan, text = planned(
        tmp_path, "--plan=tpu-v5e:2x2", "--mesh=fsdp:4", "--global_batch_size=4",
        "--data.sequence_length=256", "--remat=full", *SMALL,
    )  # fmt: skip
    assert plan["fits"]
    assert plan["fused_attention"] is False
    assert "unfused attention" in text.splitlines()
    assert plan["communication"]["fsdp"]["bytes_sent_per_device"] > 0
