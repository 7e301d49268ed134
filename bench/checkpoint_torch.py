"""The child of `bench checkpoint` that saves a torch training in every way; prints one JSON line."""

from __future__ import annotations

import json
import logging
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402

from buoy.checkpoint.saver import Saver  # noqa: E402
from buoy.checkpoint.store import Store  # noqa: E402
from buoy.torch.state.tensors import as_tensor  # noqa: E402

WIDTH = int(os.environ.get("BENCH_WIDTH", "832"))
LAYERS = 12
OURS = 5
PAIRS = 15
Done = Callable[[], bool]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Training:
    """About 0.8 GB of weights and Adam state, steps of a fraction of a second."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Block() for _ in range(LAYERS)], nn.Linear(WIDTH, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x, self.y = torch.randn(16, WIDTH), torch.randint(0, 10, (16,))
        for _ in range(3):
            self.step()

    def step(self) -> float:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()
        return time.perf_counter() - started

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer/{number}.{name}": tensor for name, tensor in values.items()}
        return found


class Methods:
    """Every way to save; each returns None when it is done, or how to ask whether it is."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder = training, folder
        self.store = Store(folder / "run")
        self.saver: Saver | None = None
        self.step = 0
        self._stagers: dict[str, Any] = {}
        self.all: dict[str, Callable[[Path], Done | None]] = {
            "buoy": self.buoy,
            "torch.save": self.torch_save,
            "torch.save + fsync + rename": self.torch_save_durable,
            "safetensors save_file": self.safetensors,
            "DCP save": self.dcp,
            "DCP async_save, thread": self.dcp_thread,
            "DCP async_save, thread, cached": lambda path: self.dcp_cached(
                path, AsyncCheckpointerType.THREAD
            ),
            "DCP async_save, process, cached": lambda path: self.dcp_cached(
                path, AsyncCheckpointerType.PROCESS
            ),
            "torchsnapshot take": self.snapshot,
            "torchsnapshot async_take": self.snapshot_async,
            "clone + thread": self.clone_thread,
        }

    def buoy(self, path: Path) -> Done:
        saver = self.saver = self.saver or self.store.saver(print, lambda kind, **values: None)
        self.step += 1
        saver.save(self.training.state(), {"step": self.step}, as_tensor)
        return lambda: not saver.busy()

    def torch_save(self, path: Path) -> None:
        torch.save(self.training.state(), path)

    def torch_save_durable(self, path: Path) -> None:
        with open(f"{path}.tmp", "wb") as file:
            torch.save(self.training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(f"{path}.tmp", path)

    def safetensors(self, path: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self.training.tensors().items()}, path)

    def dcp(self, path: Path) -> None:
        dcp.save(self.training.state(), checkpoint_id=path)

    def dcp_thread(self, path: Path) -> Done:
        return dcp.async_save(self.training.state(), checkpoint_id=path).done  # type: ignore[union-attr]

    def dcp_cached(self, path: Path, kind: Any) -> Done:
        stager = self._stagers.setdefault(str(kind), DefaultStager(StagingOptions(False, True, False, False)))
        saving = dcp.async_save(
            self.training.state(), checkpoint_id=path, async_stager=stager, async_checkpointer_type=kind
        )
        return saving.done  # type: ignore[union-attr]

    def snapshot(self, path: Path) -> None:
        from torchsnapshot import Snapshot

        Snapshot.take(str(path), {"model": self.training.model, "optimizer": self.training.optimizer})

    def snapshot_async(self, path: Path) -> Done:
        from torchsnapshot import Snapshot

        state = {"model": self.training.model, "optimizer": self.training.optimizer}
        return Snapshot.async_take(str(path), state).done

    def clone_thread(self, path: Path) -> Done:
        def clone(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.detach().clone()
            if isinstance(value, dict):
                return {key: clone(item) for key, item in value.items()}
            return [clone(item) for item in value] if isinstance(value, list) else value

        copied = clone(self.training.state())
        thread = threading.Thread(target=torch.save, args=(copied, path))
        thread.start()
        return lambda: not thread.is_alive()


def yardsticks(training: Training, folder: Path, touched: Any) -> dict[str, float]:
    """One copy of the state into touched memory; one sequential write of it, direct and buffered, to the disk."""
    memory = memoryview(touched)
    started, at = time.perf_counter(), 0
    for tensor in training.tensors().values():
        torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(
            tensor.shape
        ).copy_(tensor)
        at += -(-tensor.nbytes // 8) * 8
    found = {"memcpy": time.perf_counter() - started}
    for name, flag in (("raw write, direct", os.O_DIRECT), ("raw write, buffered", 0)):
        path = folder / "raw"
        started = time.perf_counter()
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | flag)
        for start in range(0, len(memory), 8 << 20):
            os.pwrite(descriptor, memory[start : start + (8 << 20)], start)
        os.fsync(descriptor)
        os.close(descriptor)
        found[name] = time.perf_counter() - started
        path.unlink()
    return found


def idle(methods: Methods, name: str, path: Path) -> dict[str, float]:
    """The trainer does nothing but wait: stall, time until it is done, and the peak of memory beyond what was there."""
    before = _reset_peak()
    started = time.perf_counter()
    done = methods.all[name](path)
    stall = time.perf_counter() - started
    while done is not None and not done():
        time.sleep(0.001)
    total = time.perf_counter() - started
    return {"stall": stall, "durable": total, "memory": _memory("VmHWM") - before}


def stalls(methods: Methods, path: Path, chance: random.Random) -> dict[str, float]:
    """Our stall and DCP's one after the other: between rounds this machine changes by more than they differ."""
    names = [name for name in methods.all if name == "buoy" or name.startswith("DCP async")]
    found = {}
    for name in chance.sample(names, len(names)):
        found[name] = idle(methods, name, path)["stall"]
        _tidy(methods, path)
    return found


def training_meanwhile(methods: Methods, name: str, path: Path) -> dict[str, float] | None:
    """Steps while it is written, against steps right before and after."""
    training = methods.training
    plain = [training.step() for _ in range(8)]
    done = methods.all[name](path)
    if done is None:
        return None
    during = []
    started = time.perf_counter()
    while not done():
        during.append(training.step())
    written = time.perf_counter() - started
    plain += [training.step() for _ in range(8)]
    base = statistics.fmean(plain)
    return {
        "slowdown": statistics.fmean(during) / base,
        "lost": sum(during) - len(during) * base,
        "written": written,
    }


def loads(methods: Methods, path: Path, *, cold: bool) -> dict[str, float]:
    """Each in a process of its own, as a resumed training is, from a cold or a warm cache."""
    torch.save(methods.training.state(), path)
    ours = Path(methods.store.list()[0].folder) / "state.safetensors"
    found = {}
    for who, file, where in (("torch.load", path, path), ("buoy", ours, methods.folder / "run")):
        _cache(file, drop=cold)
        command = [sys.executable, "-m", "bench.checkpoint_load", who, str(where)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        found[who] = float(done.stdout)
    path.unlink()
    return found


def _cache(path: Path, *, drop: bool) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    while not drop and os.read(descriptor, 8 << 20):
        pass
    os.close(descriptor)


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str, pid: str = "self") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    training = Training()
    methods = Methods(training, folder)
    size = sum(-(-tensor.nbytes // 8) * 8 for tensor in training.tensors().values())
    touched = mmap.mmap(-1, -(-size // (8 << 20)) * (8 << 20))
    touched.write(bytes(len(touched)))
    found: dict[str, Any] = {
        "bytes": size,
        "idle": {},
        "training": {},
        "yardsticks": [],
        "load": [],
        "memory": {},
    }
    chance = random.Random(0)
    for turn in range(rounds + 1):  # the first one warms everything up and is not counted
        order = list(methods.all)
        chance.shuffle(order)
        for name in order:
            path = folder / "other"
            for again in reversed(range(OURS if turn and name == "buoy" else 1)):
                measured = yardsticks(training, folder, touched)
                result = idle(methods, name, path)
                _tidy(methods, path)
                if again:  # of our own more samples: it is held to its figure, the others only compared
                    found["idle"].setdefault(name, []).append({**result, "memcpy": measured["memcpy"]})
            slowed = training_meanwhile(methods, name, path) if turn else None
            _tidy(methods, path)
            if not turn:
                # Its first use: what it keeps for later ones counts too.
                found["memory"][name] = result["memory"]
            else:
                found["yardsticks"].append(measured)
                found["idle"].setdefault(name, []).append({**result, "memcpy": measured["memcpy"]})
                if slowed is not None:
                    found["training"].setdefault(name, []).append(slowed)
        if turn:
            found["load"].append(
                {
                    "cold": loads(methods, folder / "other", cold=True),
                    "warm": loads(methods, folder / "other", cold=False),
                }
            )
    found["rivals"] = [stalls(methods, folder / "other", chance) for _ in range(PAIRS)]
    if methods.saver is not None:
        methods.saver.close()
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # DCP's process and gloo do not leave by themselves


def _tidy(methods: Methods, path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    for entry in methods.store.list()[1:]:
        shutil.rmtree(entry.folder)


if __name__ == "__main__":
    main()
