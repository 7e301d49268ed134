"""The models behind the recorded traces, defined again: parameters and operations in the originals' order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from buoy.estimate.tracing.steps import Job


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def images(model: nn.Module, batch: int, size: int, classes: int = 100) -> tuple[nn.Module, Any, Any]:
    return model, (torch.empty(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)), classify


def mlp() -> tuple[nn.Module, Any, Any]:
    layers = [
        nn.Linear(1024, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.GELU(),
    ]
    model = nn.Sequential(*layers, nn.Linear(4096, 1000))
    return model, (torch.empty(512, 1024), torch.zeros(512, dtype=torch.long)), classify


class BasicBlock(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.b1 = nn.BatchNorm2d(out)
        self.c2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.b2 = nn.BatchNorm2d(out)
        shortcut = [nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out)]
        self.sc = nn.Sequential(*([] if inside == out and stride == 1 else shortcut))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.b1(self.c1(x)), inplace=True)
        return functional.relu(self.b2(self.c2(y)) + self.sc(x), inplace=True)


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        inside = 64
        for level in range(4):
            for index in range(2):
                blocks.append(BasicBlock(inside, 64 * 2**level, 2 if index == 0 and level else 1))
                inside = 64 * 2**level
        self.body = nn.Sequential(*blocks)
        self.fc = nn.Linear(inside, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(self.stem(x)).mean((2, 3)))


class Bottleneck(nn.Module):
    """ResNet-50's block."""

    def __init__(self, inside: int, planes: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * 4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.bn3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet50(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inside = 64
        for level, count in enumerate((3, 4, 6, 3)):
            planes = 64 * 2**level
            blocks = []
            for index in range(count):
                stride = 2 if level and index == 0 else 1
                down = None
                if index == 0:
                    down = nn.Sequential(
                        nn.Conv2d(inside, planes * 4, 1, stride, bias=False), nn.BatchNorm2d(planes * 4)
                    )
                blocks.append(Bottleneck(inside, planes, stride, down))
                inside = planes * 4
            setattr(self, f"layer{level + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


def divisible(value: float, by: int = 8) -> int:
    new = max(by, int(value + by / 2) // by * by)
    return new + by if new < 0.9 * value else new


class Squeeze(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = divisible(channels // 4)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, inner, 1)
        self.fc2 = nn.Conv2d(inner, channels, 1)
        self.activation = nn.ReLU()
        self.scale_activation = nn.Hardsigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.avgpool(x)
        scale = self.fc1(scale)
        scale = self.activation(scale)
        scale = self.fc2(scale)
        return self.scale_activation(scale) * x


def conv_norm(
    inside: int, out: int, kernel: int, stride: int = 1, groups: int = 1, act: Any = None
) -> nn.Module:
    parts: list[nn.Module] = [
        nn.Conv2d(inside, out, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out, eps=0.001, momentum=0.01),
    ]
    return nn.Sequential(*parts, *([act(inplace=True)] if act else []))


class Inverted(nn.Module):
    def __init__(
        self, inside: int, kernel: int, wide: int, out: int, se: bool, hard: bool, stride: int
    ) -> None:
        super().__init__()
        act = nn.Hardswish if hard else nn.ReLU
        self.skip = stride == 1 and inside == out
        layers: list[nn.Module] = []
        if wide != inside:
            layers.append(conv_norm(inside, wide, 1, act=act))
        layers.append(conv_norm(wide, wide, kernel, stride, wide, act))
        if se:
            layers.append(Squeeze(wide))
        layers.append(conv_norm(wide, out, 1))
        self.block = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.block(x)
        if self.skip:
            result += x
        return result


class MobileNetV3Large(nn.Module):
    ROWS = (
        (16, 3, 16, 16, False, False, 1), (16, 3, 64, 24, False, False, 2), (24, 3, 72, 24, False, False, 1),
        (24, 5, 72, 40, True, False, 2), (40, 5, 120, 40, True, False, 1), (40, 5, 120, 40, True, False, 1),
        (40, 3, 240, 80, False, True, 2), (80, 3, 200, 80, False, True, 1), (80, 3, 184, 80, False, True, 1),
        (80, 3, 184, 80, False, True, 1), (80, 3, 480, 112, True, True, 1), (112, 3, 672, 112, True, True, 1),
        (112, 5, 672, 160, True, True, 2), (160, 5, 960, 160, True, True, 1), (160, 5, 960, 160, True, True, 1),
    )  # fmt: skip

    def __init__(self, classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = [conv_norm(3, 16, 3, 2, act=nn.Hardswish)]
        blocks += [Inverted(*row) for row in self.ROWS]
        blocks.append(conv_norm(160, 960, 1, act=nn.Hardswish))
        self.features = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(960, 1280),
            nn.Hardswish(inplace=True),
            nn.Dropout(0.2, inplace=True),
            nn.Linear(1280, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, dropout=0.0, batch_first=True)
        self.dropout = nn.Dropout(0.0)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.0, inplace=False), nn.Linear(inner, width),
            nn.Dropout(0.0, inplace=False),
        )  # fmt: skip

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x)
        x = x + input
        y = self.ln_2(x)
        y = self.mlp(y)
        return x + y


class Encoder(nn.Module):
    def __init__(self, length: int, layers: int, heads: int, width: int, inner: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, length, width))
        self.dropout = nn.Dropout(0.0)
        self.layers = nn.Sequential(*[EncoderBlock(width, heads, inner) for _ in range(layers)])
        self.ln = nn.LayerNorm(width, eps=1e-6)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = input + self.pos_embedding
        return self.ln(self.layers(self.dropout(input)))


class ViTBase16(nn.Module):
    def __init__(self, classes: int, width: int = 768) -> None:
        super().__init__()
        self.width = width
        self.conv_proj = nn.Conv2d(3, width, 16, 16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = Encoder(197, 12, 12, width, 3072)
        self.heads = nn.Sequential(nn.Linear(width, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        x = self.conv_proj(x)
        x = x.reshape(n, self.width, 14 * 14)
        x = x.permute(0, 2, 1)
        batch_class_token = self.class_token.expand(n, -1, -1)
        x = torch.cat([batch_class_token, x], dim=1)
        x = self.encoder(x)
        x = x[:, 0]
        return self.heads(x)


def gpt2(
    checkpointing: bool = False, amp: Any = None, layers: int = 4, attention: str = "sdpa"
) -> tuple[nn.Module, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=512, n_head=8, vocab_size=20000, n_positions=512, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if amp:
            with torch.autocast(batch[0].device.type, dtype=amp):
                return model(input_ids=batch[0], labels=batch[0]).loss
        return model(input_ids=batch[0], labels=batch[0]).loss

    return model, (torch.zeros(4, 256, dtype=torch.long),), loss


def llama(batch: int, checkpointing: bool) -> tuple[nn.Module, Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=8000, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(input_ids=batch[0], labels=batch[0]).loss

    return model, (torch.zeros(batch, 256, dtype=torch.long),), loss


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "mlp": mlp,
    "resnet18": lambda: images(SmallResNet(), 16, 160),
    "gpt2_sdpa": gpt2,
    "gpt2_eager": partial(gpt2, attention="eager"),
    "gpt2_amp_bf16": partial(gpt2, amp=torch.bfloat16),
    "gpt2_ckpt": partial(gpt2, checkpointing=True),
    "gpt2_amp_ckpt": partial(gpt2, checkpointing=True, amp=torch.bfloat16, layers=8),
    "resnet50_b16": lambda: images(ResNet50(100), 16, 96),
    "mobilenet_v3_large_b32": lambda: images(MobileNetV3Large(100), 32, 96),
    "vit_b_16_b4": lambda: images(ViTBase16(100), 4, 224),
    "llama_small_b4_t256": partial(llama, 4, False),
    "llama_small_ckpt": partial(llama, 8, True),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "SGD": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}


def job(name: str) -> Job:
    """The job of a recorded trace: `mlp.AdamW`."""
    model, optimizer = name.split(".")
    with torch.device("meta"):
        module, batch, loss = MODELS[model]()
    return Job(module, batch, loss, OPTIMIZERS[optimizer])
