"""Where training runs, as dated data: what each platform grants, who says so, and whether anyone measured it.

The numbers live in platforms.csv. A leading `~` there marks a value as unverified: reported by third parties,
or the lesser of two that disagree. The machine's own readings always come first; see `buoy.machine.limits`.
"""

from __future__ import annotations

import csv
import difflib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources

from buoy.errors import UsageError
from buoy.machine import gpu, host

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number (bytes, seconds, cores) and whether it was measured or stated by the vendor."""

    value: float
    verified: bool


@dataclass(frozen=True, slots=True)
class Platform:
    """One row of platforms.csv; what is not known is None."""

    id: str
    platform: str
    tier: str
    accelerator: str
    devices: int | None
    device_memory: Quantity | None
    ram: Quantity | None
    disk: Quantity | None
    vcpus: Quantity | None
    max_runtime: Quantity | None
    """Seconds a session may live."""
    max_runtime_source: str
    idle: Quantity | None
    """Seconds without a user after which the session is taken away."""
    units_per_hour: Quantity | None
    confidence: str
    source: str
    date: str
    note: str

    def cite(self, quantity: Quantity) -> str:
        """Where a number of this row comes from, in a few words.

        >>> row = by_id("colab-t4")
        >>> row.cite(row.ram)
        'platform colab-t4, measured in session 2024-02-27'
        """
        if quantity is self.max_runtime and self.max_runtime_source:
            origin = self.max_runtime_source
        else:
            origin = f"{self.confidence} {self.date}"
        doubt = "" if quantity.verified else ", unverified"
        return f"platform {self.id}, {origin}{doubt}"


@functools.cache
def all_platforms() -> tuple[Platform, ...]:
    """Every platform we have data for, in the order of the file."""
    text = resources.files("buoy.machine").joinpath("platforms.csv").read_text(encoding="utf-8")
    return tuple(_from_row(row) for row in csv.DictReader(text.splitlines()))


def by_id(name: str) -> Platform:
    """The platform with this id, or a UsageError that names the nearest.

    >>> by_id("kaggle-p100").accelerator
    'P100'
    """
    known = {platform.id: platform for platform in all_platforms()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    raise UsageError(
        "unknown platform",
        received=repr(name),
        expected="one of " + ", ".join(known),
        hint=f"did you mean `{near[0]}`?" if near else "platforms are named like `colab-t4`",
    )


def detect(environ: Mapping[str, str], root: str = "/", gpus: list[str] | None = None) -> Platform | None:
    """The platform we are on; None on a plain machine, and where we have no row for what was found.

    `gpus` are model names; None asks the driver.
    """
    name = _platform_name(environ, root)
    if name is None:
        return None
    if name == "slurm":
        return _slurm(environ)
    if name == "colab-enterprise":
        return by_id("colab-enterprise")
    found = _gpu_names(root) if gpus is None else gpus
    if name == "colab":
        chosen = _colab(environ, root, found)
    elif (
        name == "kaggle"
        and not found
        and (environ.get("TPU_ACCELERATOR_TYPE") or environ.get("TPU_WORKER_ID"))
    ):
        chosen = "kaggle-tpu-v5e8"
    else:
        words = _words(found)
        by_gpu = next((row for word, row in _BY_GPU[name].items() if word in words), None)
        chosen = by_gpu or (None if found else _BY_GPU[name].get(""))
    return None if chosen is None else by_id(chosen)


_BY_GPU = {
    "kaggle": {"T4": "kaggle-t4x2", "P100": "kaggle-p100", "": "kaggle-cpu"},
    "spaces": {"T4": "spaces-t4", "A10G": "spaces-a10g", "": "spaces-cpu"},
    "studiolab": {"T4": "studiolab-t4", "": "studiolab-cpu"},
    "lightning": {"": "lightning-cpu"},
    "paperspace": {"M4000": "paperspace-free", "P5000": "paperspace-free"},
}
"""The row of a platform by a word in its GPU's name, and without a GPU."""


def epoch(environ: Mapping[str, str], name: str) -> float | None:
    """A variable that holds seconds since 1970; None when it is missing or something else."""
    text = environ.get(name, "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None


def _platform_name(environ: Mapping[str, str], root: str) -> str | None:
    """Kaggle comes before Colab: its images carry some of Colab's packages and variables."""
    if environ.get("KAGGLE_KERNEL_RUN_TYPE"):
        return "kaggle"
    if environ.get("VERTEX_PRODUCT") == "COLAB_ENTERPRISE":
        return "colab-enterprise"
    if environ.get("COLAB_RELEASE_TAG") or environ.get("COLAB_BACKEND_VERSION"):
        return "colab"
    if environ.get("SPACE_ID"):
        return "spaces"
    if environ.get("LIGHTNING_CLOUD_SPACE_ID"):
        return "lightning"
    if environ.get("PAPERSPACE_NOTEBOOK_REPO_ID") or environ.get("PAPERSPACE_CLUSTER_ID"):
        return "paperspace"
    if os.path.isdir(root.rstrip("/") + "/home/studio-lab-user"):
        return "studiolab"
    return "slurm" if environ.get("SLURM_JOB_ID") else None


def _colab(environ: Mapping[str, str], root: str, gpus: list[str]) -> str | None:
    ram = host.memory(root).total or 0
    if environ.get("COLAB_TPU_1VM"):
        return "colab-tpu-v6e1" if ram > 100 * _GIB else "colab-tpu-v5e1"
    words = _words(gpus)
    if "T4" in words:
        return "colab-t4-highram" if ram > 32 * _GIB else "colab-t4"
    if "A100" in words:
        return "colab-a100-80" if "80GB" in words else "colab-a100"
    if {"RTX", "PRO", "6000"} <= words:
        return "colab-g4"
    for word, name in (("L4", "colab-l4"), ("H100", "colab-h100")):
        if word in words:
            return name
    # COLAB_GPU is the empty string, not absent, on a machine without one.
    return None if gpus or environ.get("COLAB_GPU") else "colab-cpu"


def _slurm(environ: Mapping[str, str]) -> Platform:
    """The job's own limit; without it the row says nothing."""
    row = by_id("slurm")
    start, end = epoch(environ, "SLURM_JOB_START_TIME"), epoch(environ, "SLURM_JOB_END_TIME")
    if start is None or end is None or end <= start:
        return row
    limit = Quantity(end - start, verified=True)
    return replace(row, max_runtime=limit, max_runtime_source="SLURM_JOB_END_TIME less SLURM_JOB_START_TIME")


def _gpu_names(root: str) -> list[str]:
    nvml = gpu.open_nvml() if root == "/" else None
    if nvml is None:
        return gpu.driver_names(root)
    names = [str(device["name"]) for device in nvml.devices() if device["name"]]
    nvml.close()
    return names or gpu.driver_names(root)


def _words(names: list[str]) -> set[str]:
    """`NVIDIA A100-SXM4-80GB` as its words: whole words keep `L4` and `L40` apart."""
    return {word for name in names for word in name.replace("-", " ").split()}


def _from_row(row: dict[str, str]) -> Platform:
    return Platform(
        id=row["id"],
        platform=row["platform"],
        tier=row["tier"],
        accelerator=row["accelerator"],
        devices=int(row["devices"]) if row["devices"] else None,
        device_memory=_quantity(row["device_gib"], _GIB),
        ram=_quantity(row["ram_gib"], _GIB),
        disk=_quantity(row["disk_gib"], _GIB),
        vcpus=_quantity(row["vcpus"], 1),
        max_runtime=_quantity(row["max_runtime_h"], 3600),
        max_runtime_source=row["max_runtime_source"],
        idle=_quantity(row["idle_min"], 60),
        units_per_hour=_quantity(row["units_per_hour"], 1),
        confidence=row["confidence"],
        source=row["source"],
        date=row["date"],
        note=row["note"],
    )


def _quantity(cell: str, unit: int) -> Quantity | None:
    return Quantity(float(cell.removeprefix("~")) * unit, not cell.startswith("~")) if cell else None
