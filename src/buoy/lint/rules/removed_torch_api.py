"""BY207: names and arguments that PyTorch no longer has."""

from __future__ import annotations

from collections.abc import Iterator

from buoy.lint.facts import Facts
from buoy.lint.frameworks import is_guarded
from buoy.lint.model import Finding, Rule
from buoy.lint.removed import drop_argument, removed_uses, strike
from buoy.lint.target import Target, removed

RULE = Rule("BY207", "removed-torch-api", "a name or an argument that PyTorch no longer has")

_HINTS = {
    "torch._six": "`math.inf` for `inf`, `collections.abc` for `container_abcs`, `str` for `string_classes`",
    "torch.symeig": "`torch.linalg.eigh`",
    "torch.eig": "`torch.linalg.eig`",
    "torch.lstsq": "`torch.linalg.lstsq`, with its arguments the other way round",
    "torch.solve": "`torch.linalg.solve`, with its arguments the other way round",
    "torch.matrix_rank": "`torch.linalg.matrix_rank`",
    "torch.rfft": "`torch.fft.rfft`, which returns complex numbers",
    "torch.irfft": "`torch.fft.irfft`, which takes complex numbers",
    "torch.set_deterministic": "`torch.use_deterministic_algorithms`",
}


def find(facts: Facts, target: Target) -> Iterator[Finding]:
    """Removed names through imports and attributes, then removed arguments."""
    if "torch" not in facts.packages:
        return
    for use in removed_uses(facts, target, ("torch",)):
        if use.hide(RULE.code, facts):
            hint = _HINTS.get(use.name, "PyTorch's release notes name the successor")
            yield Finding(facts.document.span(use.node), "error", use.message(facts), hint)
    table = removed()["torch"]
    for owner, keywords in table["keywords"].items():
        for call in facts.called(owner):
            for keyword in call.node.keywords:
                name = keyword.arg or ""
                if name not in keywords or is_guarded(call.block):
                    continue
                if not target.lacks("torch", keywords[name], facts):
                    continue
                message = (
                    f"`{owner.rpartition('.')[2]}` has no argument `{name}` any more: not in torch {keywords[name]} "
                    f"nor later (tried in {table['version']}); TypeError{strike(facts, call.block, call.node.lineno)}"
                )
                fix = drop_argument(keyword, facts, "safe")
                yield Finding(facts.document.span(keyword), "error", message, _hint(name), fix)


def _hint(keyword: str) -> str:
    if keyword == "verbose":
        return "leave it out; `scheduler.get_last_lr()` tells the learning rate"
    return f"leave `{keyword}` out"
