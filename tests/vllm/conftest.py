"""Real vLLM, in an environment of its own: `make test-vllm` makes it and names its interpreter in VLLM_PYTHON. Without that
these tests are not collected: `make test` has no vLLM."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from livedraft.integrations.vllm.launch import write_inside_part
from livedraft.models.config import ModelConfig
from livedraft.records import EXPORTED_TARGET_KEY, EXPORTED_VERSION_KEY
from tests.hf_folder import TEXT_CONFIG, byte_tokenizer, write_hf_folder
from tests.tiny import random_tensors

collect_ignore_glob = [] if os.environ.get("VLLM_PYTHON") else ["test_*.py"]

# vLLM's CPU attention knows heads of 32 and more.
CONFIG = replace(
    TEXT_CONFIG, width=64, feed_forward_width=96, num_layers=2, num_heads=2, num_kv_heads=1, head_width=32,
    has_tied_embeddings=True,
)  # fmt: skip
FINGERPRINT = "the-tiny-target"


def write_model(folder: Path, config: ModelConfig, tensors: dict, version: str = "") -> Path:
    """In bf16, with the names a draft's file carries."""
    from safetensors.torch import save_file

    write_hf_folder(folder, config, {})
    names = {EXPORTED_TARGET_KEY: FINGERPRINT, EXPORTED_VERSION_KEY: version}
    save_file({n: t.to(torch.bfloat16) for n, t in tensors.items()}, folder / "model.safetensors", metadata=names)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    return Path(os.environ["VLLM_PYTHON"])


@pytest.fixture(scope="session")
def inside(vllm_python, tmp_path_factory):
    """Run steps in one engine, in a process of vLLM's own; returns its report."""
    part = write_inside_part(tmp_path_factory.mktemp("inside"))
    script = Path(__file__).parent / "inside.py"

    def run(steps: list, **orders) -> dict:
        orders = {name: str(value) if isinstance(value, Path) else value for name, value in orders.items()}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        found = subprocess.run(
            [str(vllm_python), str(script), json.dumps({**orders, "steps": steps}, default=str)],
            capture_output=True, text=True, timeout=600, env={**kept, "PYTHONPATH": str(part), "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        line = next((line for line in found.stdout.splitlines() if line.startswith("REPORT ")), None)
        assert line is not None, found.stdout[-3000:] + found.stderr[-6000:]
        return json.loads(line.removeprefix("REPORT "))

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """A target; a draft that is the target itself (every token accepted) and one of other weights (next to none)."""
    root = tmp_path_factory.mktemp("models")
    own, other = random_tensors(CONFIG, seed=0, scale=0.2), random_tensors(CONFIG, seed=1, scale=0.2)
    return {
        "target": write_model(root / "target", CONFIG, own),
        "good": write_model(root / "good", CONFIG, own, "good"),
        "bad": write_model(root / "bad", CONFIG, other, "bad"),
    }
