"""The code that docs/plan.md gives for remedies called exact, run as it stands there."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


def code_after(words: str) -> str:
    found = re.search(r"```python\n(.*?)```", PAGE[PAGE.index(words) :], re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": 40, "n_positions": 320, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    """More tokens than one chunk, the ends of the sequences padded."""
    tokens = torch.randint(0, 40, (4, 300))
    mask = torch.ones_like(tokens)
    for row, length in enumerate((300, 270, 120, 5)):
        mask[row, length:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def test_chunked_cross_entropy_is_the_models_own_loss_and_gradient(model: Any, batch: dict[str, Any]) -> None:
    ours, own = copy.deepcopy(model), copy.deepcopy(model)
    names = {"model": ours, **batch}

    exec(code_after("Chunked cross-entropy for a causal"), names)
    names["loss"].backward()
    expected = own(**batch).loss
    expected.backward()

    torch.testing.assert_close(names["loss"], expected)
    for (name, one), other in zip(ours.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_steps_inside_backward_are_the_optimizers_own(model: Any, batch: dict[str, Any]) -> None:
    ours, own = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)

    exec(code_after("The optimizer's step inside backward"), {"model": ours, "torch": torch})
    for _ in range(2):
        ours(**batch).loss.backward()
        optimizer.zero_grad()
        own(**batch).loss.backward()
        optimizer.step()

    for (name, one), other in zip(ours.named_parameters(), own.parameters(), strict=True):
        assert one.grad is None, name
        torch.testing.assert_close(one, other, msg=name)
