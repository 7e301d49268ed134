"""Random state around a PyTorch training, python's, numpy's, torch's, every accelerator's: taken, put back, seeded."""

from __future__ import annotations

import array
import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

State = dict[str, Any]
_MASK = (1 << 64) - 1


def mix(*parts: object) -> int:
    """A number of 64 bits that is the same for the same parts in every process.

    >>> mix(7, 0, "order") == mix(7, 0, "order") != mix(7, 1, "order")
    True
    """
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def initial_seed() -> int:
    """What the training was seeded with."""
    return torch.initial_seed()


def seed_everything(number: int) -> None:
    """Seed the generators that data code draws from: python's, numpy's and torch's on the CPU."""
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number & (_MASK >> 1))  # torch.manual_seed takes 100 times as long


class Stream:
    """Random state of its own for data code that runs in the training's process; the training's is put back.

    >>> before = torch.get_rng_state()
    >>> with Stream(7):
    ...     drawn = torch.rand(3)
    >>> bool((torch.get_rng_state() == before).all())
    True
    """

    def __init__(self, number: int) -> None:
        self._number: int | None = number
        self._mine: tuple[Any, ...] | None = None
        self._theirs: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        self._theirs = take()
        if self._mine is not None:
            put(self._mine)
        elif self._number is not None:
            seed_everything(self._number)

    def __exit__(self, *error: object) -> None:
        self._mine = take()
        if self._theirs is not None:
            put(self._theirs)

    def state_dict(self) -> State:
        """Where this stream is."""
        with self:
            return capture(accelerators=False)

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        with self:
            restore(state)


def capture(*, accelerators: bool = True) -> State:
    """All random state of this process, in values that can be saved."""
    version, words, gauss = random.getstate()
    state: State = {
        "python": {"version": version, "words": array.array("Q", words).tobytes(), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if accelerators:
        for name, read, _ in _accelerators():
            state[name] = read()
    return state


def restore(state: State, say: Callable[[str], None] | None = None) -> None:
    """Put all random state back; what this machine has no place for is told through `say`."""
    python = state["python"]
    words = array.array("Q")
    words.frombytes(python["words"])
    random.setstate((python["version"], tuple(words), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    known = {name: (read, write) for name, read, write in _accelerators(even_idle=True)}
    for name in state:
        if name in ("python", "torch", "numpy"):
            continue
        try:
            known[name][1](state[name])
        except (KeyError, RuntimeError, IndexError, AssertionError):
            if say is not None:
                say(f"the random state of {name} could not be put back here: what is drawn there will differ")


def generator_state(generator: object) -> Any:
    """The state of somebody's own generator (torch's, numpy's, python's); None: it is no generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": array.array("Q", words).tobytes(), "gauss": gauss}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(generator, numpy.random.Generator):
            return generator.bit_generator.state
        if isinstance(generator, numpy.random.RandomState):
            return generator.get_state(legacy=False)
    return None


def set_generator_state(generator: Any, state: Any) -> None:
    """Put the state of somebody's own generator back."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        words = array.array("Q")
        words.frombytes(state["words"])
        generator.setstate((state["version"], tuple(words), state["gauss"]))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def take() -> tuple[Any, ...]:
    """The global generators on the CPU as they are, quickly; for `put` in the same process."""
    numpy = sys.modules.get("numpy")
    return (
        random.getstate(),
        torch.default_generator.get_state(),
        numpy.random.get_state() if numpy is not None else None,
    )


def put(state: tuple[Any, ...]) -> None:
    """Make them what they were."""
    python, torch_state, numpy_state = state
    random.setstate(python)
    torch.default_generator.set_state(torch_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


def _accelerators(
    even_idle: bool = False,
) -> list[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Name, reader and writer of each accelerator's random state; one that was never used draws from its seed."""
    found: list[tuple[str, Callable[[], Any], Callable[[Any], None]]] = []
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and (even_idle or module.is_initialized()):
            found.append((name, module.get_rng_state_all, module.set_rng_state_all))
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        found.append(("mps", torch.mps.get_rng_state, torch.mps.set_rng_state))
    return found
