"""Weights out of a checkpoint as a plain `.safetensors` file that needs no buoy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

from buoy.checkpoint import lock
from buoy.checkpoint.reader import Checkpoint, StoredTensor
from buoy.errors import UsageError

_CHUNK = 8 << 20


def tensors_of(checkpoint: Checkpoint, name: str) -> dict[str, StoredTensor]:
    """The tensors of one saved thing by their own names: `model/layers.0.weight` is `layers.0.weight`.

    Weights that are tied are stored once and come out under each of their names.
    """
    if name not in checkpoint.names:
        raise UsageError(
            "no such thing in this checkpoint",
            received=repr(name),
            expected="one of " + ", ".join(checkpoint.names),
            hint="`--only NAME`; `buoy ckpt show` lists what is in it",
        )
    return dict(_flat("", checkpoint.value(name, lambda stored: stored)))


def write_safetensors(
    checkpoint: Checkpoint, name: str, path: str, progress: Callable[[int], object]
) -> tuple[int, int]:
    """Write one saved thing's tensors; how many, and their bytes. The file is there whole or not at all."""
    tensors = tensors_of(checkpoint, name)
    if not tensors:
        raise UsageError(
            f"{name!r} has no tensors",
            received=f"step {checkpoint.step} of {checkpoint.folder}",
            expected="something with weights",
            hint="`buoy ckpt show` lists what is in it",
        )
    header: dict[str, object] = {"__metadata__": {"step": str(checkpoint.step)}}
    if "torch" in checkpoint.versions:
        # Loaders of weights ask for it.
        header["__metadata__"] = {
            "format": "pt",
            "step": str(checkpoint.step),
        }
    at = 0
    for key, stored in tensors.items():
        end = at + stored.nbytes
        header[key] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": [at, end]}
        at = end
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    beside = f"{path}.{os.getpid()}.part"
    try:
        with open(beside, "xb") as file:
            file.write(len(words).to_bytes(8, "little") + words)
            for stored in tensors.values():
                memory = stored.read()
                for start in range(0, len(memory), _CHUNK):
                    progress(file.write(memory[start : start + _CHUNK]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        if os.path.exists(beside):
            os.unlink(beside)
        if not isinstance(error, OSError):
            raise
        raise UsageError(
            "cannot write the weights",
            received=f"{path}: {error.strerror}",
            expected="a file that can be written",
            hint="name another one with `-o`",
        ) from error
    return len(tensors), at


def refuse_checkpoints_folder(path: str) -> None:
    """Only buoy writes among a run's checkpoints: a file of theirs would be replaced, and the checkpoint lost."""
    folder = os.path.dirname(os.path.realpath(path))
    while folder != os.path.dirname(folder):
        if os.path.basename(folder) == "checkpoints" and _is_of_a_run(folder):
            raise UsageError(
                "the weights would be written among a run's checkpoints",
                received=path,
                expected="a file elsewhere",
                hint="`-o weights.safetensors` puts it here",
            )
        folder = os.path.dirname(folder)


def _is_of_a_run(folder: str) -> bool:
    try:
        return any(name == lock.NAME or name.startswith("step-0") for name in os.listdir(folder))
    except OSError:
        return False


def _flat(prefix: str, value: object) -> Iterator[tuple[str, StoredTensor]]:
    if isinstance(value, StoredTensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _flat(f"{prefix}.{number}" if prefix else str(number), part)
