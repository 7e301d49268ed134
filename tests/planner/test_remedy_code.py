"""The code that a remedy prints, run as it stands: with the same loss where the remedy is called exact."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from buoy.estimate.child import Request
from buoy.estimate.devices import by_id
from buoy.estimate.result import estimate
from buoy.flight import recorder
from buoy.planner.remedies import Change, _exclude, _written, changes_for, popular
from buoy.planner.result import FITS, Answer
from buoy.planner.targets import targets

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402

from buoy.estimate.tracing.build import _checkpoint  # noqa: E402
from buoy.estimate.tracing.remedies import apply, remember_code  # noqa: E402
from buoy.estimate.tracing.steps import Job, trace_steps  # noqa: E402

CPU = by_id("cpu")


@pytest.fixture(autouse=True)
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_current", recorder.Recorder(None))


def gpt() -> Job:
    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=300, n_positions=64, use_cache=False,
                                     bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0,
                                     attn_pdrop=0)  # fmt: skip
    return language(transformers.GPT2LMHeadModel(config))


def bert() -> Job:
    config = transformers.BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
                                     vocab_size=300, hidden_dropout_prob=0, attention_probs_dropout_prob=0)  # fmt: skip
    return language(transformers.BertForMaskedLM(config))


def language(model: Any) -> Job:
    tokens = torch.arange(4 * 64).reshape(4, 64)
    return Job(model.train(), {"input_ids": tokens, "labels": tokens}, lambda model, batch: model(**batch).loss,
               torch.optim.AdamW)  # fmt: skip


def blocks() -> Job:
    """Blocks of its own, beside layers that are none."""
    made = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *made, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    batch = (torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))
    return Job(model, batch, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
               torch.optim.AdamW)  # fmt: skip


def changes(make: Any, place: str) -> list[Change]:
    target = targets([place])[0]
    figure = estimate(trace_steps(make(), CPU), target.device)
    figure.trace.facts["batch"] = 4
    answer = Answer(target, figure, FITS, 4, 2, (), None, "")
    request = Request("torch", {"build": "train.py:build"}, device=target.device.id)
    advice = popular(answer, request, {})
    known = [
        Change(one.id, one.title, True, None, "", one.code) for one in advice if one.id == "channels-last"
    ]
    return changes_for(request, answer) + known


def codes(make: Any, change: Change) -> dict[str, str]:
    """What the tracer learns while it applies the change."""
    job = make()
    apply(job, (change.inside,) if change.inside else ())
    if change.request and "checkpointing" in change.request:
        remember_code(job, change.id, _checkpoint(job.model))
    return dict(job.facts.get("code", {}))


def ran(make: Any, code: str, folder: Path) -> float:
    """A step with the code, verbatim, where a person would put it; the loss."""
    torch.manual_seed(0)
    job = make()
    names: dict[str, Any] = {"torch": torch, "model": job.model, "batch": job.batch}
    names["loss_of"] = lambda batch: job.loss(names["model"], batch)
    names["optimizer"] = torch.optim.AdamW(job.model.parameters())
    if isinstance(job.batch, tuple):
        names["images"] = job.batch[0]
    exec(code.replace("runs/this", str(folder / "run")), names)
    if "run" in names:
        names["run"].finish()
    if "images" in names:
        names["batch"] = (names["images"], job.batch[1])
    loss = names.get("loss")
    if loss is None:
        loss = names["loss_of"](names["batch"])
    if loss.requires_grad and "scaler" not in names and "run" not in names:
        loss.backward()
    names["optimizer"].step()
    return float(loss.detach())


@pytest.mark.parametrize("make", [gpt, bert, blocks])
def test_each_remedys_code_runs_as_it_is_printed(make: Any, tmp_path: Path) -> None:
    plain = ran(make, "", tmp_path)
    seen = []

    for change in changes(make, "this"):
        library = {"lora": "peft", "optimizer-8bit": "torchao"}.get(change.id)
        try:
            code = _written((change,), codes(make, change))
        except Exception as error:
            assert type(error).__name__ == "EstimateError", error
            continue
        compile(code, change.id, "exec")
        if library is not None and find_spec(library) is None:
            continue
        loss = ran(make, code, tmp_path / change.id)
        seen.append(change.id)

        assert code, change.id
        assert not change.exact or loss == pytest.approx(plain, rel=1e-5), change.id

    assert {"micro-batch", "mixed-precision", "checkpointing", "in-backward", "pruning", "smaller-input",
            "optimizer-sgd", "optimizer-adafactor", "channels-last"} <= {*seen}  # fmt: skip
    assert ("chunked-loss" in seen) is (make is not blocks)


def test_the_code_for_a_gpu_is_whole_python_too() -> None:
    for change in changes(blocks, "colab-t4"):
        compile(change.code, change.id, "exec")


def test_a_scaler_and_eight_bits_do_not_go_with_a_step_inside_backward() -> None:
    found = {change.id: change for change in changes(blocks, "colab-t4")}

    assert _exclude(found["in-backward"], found["mixed-precision"]), "its gradients would still be scaled"
    assert _exclude(found["optimizer-8bit"], found["in-backward"])
    assert _exclude(found["optimizer-8bit"], found["optimizer-sgd"])
    assert not _exclude(found["checkpointing"], found["mixed-precision"])


def test_scores_that_the_model_bounds_itself_are_not_cut_into_pieces() -> None:
    job = gpt()
    job.model.config.final_logit_softcapping = 30.0

    with pytest.raises(Exception, match="changed again"):
        apply(job, ("chunked_loss",))
