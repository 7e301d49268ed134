"""The same small training steps twice: for real on the CPU under torch's profiler, and on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench.estimate_models import MobileNetV2, ResNet, ViTSmall, token_loss
from buoy.estimate.allocators import host
from buoy.estimate.devices import by_id
from buoy.estimate.tracing.fake import ordinary_values
from buoy.estimate.tracing.steps import Job, trace_steps
from tests.estimate.golden_models import classify

STEPS = 3
Make = Callable[[], tuple[nn.Module, Any, Any]]


def true_peak(make: Make) -> int:
    """The most bytes torch's CPU allocator had handed out, by the profiler's memory events."""
    torch.manual_seed(0)
    model, batch, loss = make()
    static = sum(t.untyped_storage().nbytes() for t in {*model.parameters(), *model.buffers()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(STEPS):
            copied = tuple(part.clone() for part in batch)
            optimizer.zero_grad()
            value = loss(model, copied)
            value.backward()
            optimizer.step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return static + most


def traced_peak(make: Make) -> int:
    """The same on fake tensors."""
    with torch.device("meta"):
        model, batch, loss = make()
    device = by_id("cpu")
    with ordinary_values():
        found = trace_steps(Job(model, batch, loss, partial(torch.optim.AdamW, lr=1e-3)), device, steps=STEPS)
    return host.replay(found.events).peak_allocated


def _images(model: Callable[[], nn.Module], batch: int, side: int) -> tuple[nn.Module, Any, Any]:
    return model(), (torch.zeros(batch, 3, side, side), torch.zeros(batch, dtype=torch.long)), classify


def _mlp(width: int, act: Callable[[], nn.Module]) -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Linear(256, width), act(), nn.Linear(width, width), act(), nn.Linear(width, 10))
    return model, (torch.zeros(256, 256), torch.zeros(256, dtype=torch.long)), classify


def _gpt2(layers: int, checkpointing: bool = False, attention: str = "sdpa") -> tuple[nn.Module, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=128, n_head=4, vocab_size=2000, n_positions=128, use_cache=False,
                        attn_implementation=attention, bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, (torch.zeros(4, 128, dtype=torch.long),), token_loss


def _llama() -> tuple[nn.Module, Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=2000, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config).train(), (torch.zeros(4, 128, dtype=torch.long),), token_loss


def _bert() -> tuple[nn.Module, Any, Any]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
                        vocab_size=2000)  # fmt: skip
    return BertForMaskedLM(config).train(), (torch.zeros(4, 128, dtype=torch.long),), token_loss


def _encoder() -> tuple[nn.Module, Any, Any]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return model, (torch.zeros(8, 64, 128),), lambda model, batch: model(batch[0]).sum()


def _autoencoder() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(
        nn.Linear(784, 512), nn.LayerNorm(512), nn.SiLU(), nn.Linear(512, 64), nn.Linear(64, 784)
    )
    return model, (torch.zeros(512, 784),), lambda model, batch: (model(batch[0]) - batch[0]).pow(2).mean()


MODELS: dict[str, tuple[Make, float]] = {
    "MLP, ReLU": (partial(_mlp, 1024, nn.ReLU), 0.005),
    "MLP, GELU": (partial(_mlp, 2048, nn.GELU), 0.005),
    "MLP, Tanh": (partial(_mlp, 512, nn.Tanh), 0.005),
    "autoencoder": (_autoencoder, 0.005),
    "transformer encoder": (_encoder, 0.005),
    "GPT-2, 2 layers": (partial(_gpt2, 2), 0.005),
    "GPT-2, 4 layers": (partial(_gpt2, 4), 0.005),
    "GPT-2, eager attention": (partial(_gpt2, 2, attention="eager"), 0.005),
    "GPT-2, checkpointing": (partial(_gpt2, 4, checkpointing=True), 0.005),
    "Llama, grouped heads": (_llama, 0.005),
    "BERT": (_bert, 0.005),
    "ResNet-18": (partial(_images, lambda: ResNet((2, 2, 2, 2), basic=True), 4, 64), 0.02),
    "MobileNetV2": (partial(_images, MobileNetV2, 4, 64), 0.02),
    "ViT-S": (partial(_images, ViTSmall, 1, 224), 0.02),
}
