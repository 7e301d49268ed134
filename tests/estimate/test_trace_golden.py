"""Traced from the model definitions on a CPU-only wheel, against what the real CUDA path allocated."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from buoy.estimate.allocators import native
from buoy.estimate.devices import by_id

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from buoy.estimate.tracing.steps import trace_steps  # noqa: E402
from tests.estimate.golden_models import job  # noqa: E402

T4 = by_id("t4")
# One of each kind here; `python -m bench estimate` compares all 24.
NAMES = [
    "mlp.AdamW", "resnet18.SGD", "gpt2_eager.AdamW", "gpt2_amp_bf16.SGD", "gpt2_ckpt.AdamW", "llama_small_ckpt.SGD",
    "mobilenet_v3_large_b32.SGD", "vit_b_16_b4.SGD",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_from_the_definition_has_the_peaks_of_the_real_cuda_path(name: str) -> None:
    recorded = json.loads(
        gzip.decompress((Path(__file__).parent / "golden" / f"{name}.json.gz").read_bytes())
    )

    replay = native.replay(trace_steps(job(name), T4).events)

    assert replay.peak_allocated == pytest.approx(recorded["peak_allocated"], rel=0.005)
    assert replay.peak_reserved == pytest.approx(recorded["peak_reserved"], rel=0.03)
