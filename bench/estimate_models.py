"""The models of published GPU measurements that can be built here: from transformers' configs, or defined again."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from tests.estimate.golden_models import BasicBlock, Bottleneck, ViTBase16, classify


class VGG(nn.Module):
    PLANS: ClassVar = {
        "vgg16": (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0),
        "vgg19": (
            64,
            64,
            0,
            128,
            128,
            0,
            256,
            256,
            256,
            256,
            0,
            512,
            512,
            512,
            512,
            0,
            512,
            512,
            512,
            512,
            0,
        ),
    }

    def __init__(self, name: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for out in self.PLANS[name]:
            if out:
                layers += [nn.Conv2d(inside, out, 3, padding=1), nn.ReLU(inplace=True)]
                inside = out
            else:
                layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(),
            nn.Linear(4096, 1000),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class ResNet(nn.Module):
    def __init__(self, counts: tuple[int, ...], *, basic: bool = False, wide: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
                                  nn.MaxPool2d(3, 2, 1))  # fmt: skip
        blocks: list[nn.Module] = []
        inside = 64
        for level, count in enumerate(counts):
            planes = 64 * 2**level
            for index in range(count):
                stride = 2 if level and index == 0 else 1
                if basic:
                    blocks.append(BasicBlock(inside, planes, stride))
                    inside = planes
                    continue
                out = planes * 4
                down = None
                if index == 0:
                    down = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))
                block = Bottleneck(inside, planes, stride, down)
                if wide > 1:
                    inner = planes * wide
                    block.conv1, block.bn1 = nn.Conv2d(inside, inner, 1, bias=False), nn.BatchNorm2d(inner)
                    block.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
                    block.bn2, block.conv3 = nn.BatchNorm2d(inner), nn.Conv2d(inner, out, 1, bias=False)
                blocks.append(block)
                inside = out
        self.body = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inside, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(self.pool(self.body(self.stem(x))), 1))


class InvertedV2(nn.Module):
    def __init__(self, inside: int, out: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = inside * expand
        self.skip = stride == 1 and inside == out
        layers: list[nn.Module] = [] if expand == 1 else [conv(inside, wide, 1)]
        layers += [
            conv(wide, wide, 3, stride, wide),
            nn.Conv2d(wide, out, 1, bias=False),
            nn.BatchNorm2d(out),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.skip else self.conv(x)


def conv(inside: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, out, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False), nn.BatchNorm2d(out),
        nn.ReLU6(inplace=True),
    )  # fmt: skip


class MobileNetV2(nn.Module):
    ROWS = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv(3, 32, 3, 2)]
        inside = 32
        for expand, out, count, stride in self.ROWS:
            for index in range(count):
                layers.append(InvertedV2(inside, out, stride if index == 0 else 1, expand))
                inside = out
        self.features = nn.Sequential(*layers, conv(inside, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


class ViTSmall(nn.Module):
    """timm's vit_small_patch16_224: width 384, 12 layers, 6 heads, joint projections."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 384, 16, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, 384))
        self.pos = nn.Parameter(torch.zeros(1, 197, 384))
        self.blocks = nn.Sequential(*[TimmBlock(384, 6) for _ in range(12)])
        self.norm = nn.LayerNorm(384)
        self.head = nn.Linear(384, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


class TimmBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = (
            self.qkv(self.norm1(x))
            .reshape(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = (
            functional.scaled_dot_product_attention(*y.unbind(0))
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.proj(y)
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


CASED = 28_996
"""Words of the cased BERT models."""


def language_model(name: str) -> Any:
    """A transformer built from its published configuration, without a download."""
    import transformers as t

    configs: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(use_cache=False)),
        "gpt2-large": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=1280, n_layer=36, n_head=20, use_cache=False)
        ),
        "bert-base": lambda: t.BertForMaskedLM(t.BertConfig(vocab_size=CASED)),
        "bert-large": lambda: t.BertForMaskedLM(
            t.BertConfig(
                vocab_size=CASED, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                intermediate_size=4096,
            )
        ),
        "xlnet-large-cased": lambda: t.XLNetForSequenceClassification(t.XLNetConfig(num_labels=2)),
    }  # fmt: skip
    return configs[name]()


def keeping_outputs() -> Callable[[Any, Any], torch.Tensor]:
    """The loss of a loop with `outputs = model(...)`: the logits stay until the next step has its own."""
    kept: list[Any] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        given: dict[str, Any] = {"labels": batch[0]}
        # XLNet classifies, and its tokenizer gives masks and types beside the words.
        if not hasattr(model, "cls"):
            given = {"labels": batch[0][:, 0], "attention_mask": batch[0].float(), "token_type_ids": batch[0]}
        kept[:] = [model(input_ids=batch[0], **given)]
        value: torch.Tensor = kept[0].loss
        return value

    return loss


def token_loss(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


def image_model(name: str) -> nn.Module:
    """A classifier with 1000 classes."""
    models: dict[str, Callable[[], nn.Module]] = {
        "vgg16": lambda: VGG("vgg16"),
        "vgg19": lambda: VGG("vgg19"),
        "resnet18": lambda: ResNet((2, 2, 2, 2), basic=True),
        "resnet50": lambda: ResNet((3, 4, 6, 3)),
        "wide_resnet50_2": lambda: ResNet((3, 4, 6, 3), wide=2),
        "mobilenet_v2": MobileNetV2,
        "vit_small_patch16_224": ViTSmall,
        "vit_base": lambda: ViTBase16(1000),
    }
    return models[name]() if name in models else _installed(name)


def _installed(name: str) -> nn.Module:
    """The model of that name from timm or torchvision, where they are installed; else a KeyError."""
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torchvision") is None:
        raise KeyError(name)
    let_torchvision_load()
    libraries: Any = importlib.import_module("torchvision.models"), importlib.import_module("timm")
    with torch.device("cpu"):  # some of them read values while they are built
        if name in libraries[0].list_models():
            model: nn.Module = libraries[0].get_model(name)
        elif name in libraries[1].list_models():
            model = libraries[1].create_model(name)
        else:
            raise KeyError(name)
    return model


@functools.cache
def let_torchvision_load() -> torch.library.Library:
    """Name the operations that its wheel cannot load beside a CPU-only torch; they go when the result goes."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


__all__ = [
    "classify",
    "image_model",
    "keeping_outputs",
    "language_model",
    "let_torchvision_load",
    "token_loss",
]
