"""Traces for a plan: each wanted once, made in a process that is not ours, and remembered."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from buoy.errors import BuoyError, UsageError, this_system
from buoy.estimate import child
from buoy.estimate.child import LIVE, Request
from buoy.estimate.trace import Trace
from buoy.planner import stage
from buoy.planner.stage import forked

_LOOK_EVERY = 0.2
_FORKS = hasattr(os, "fork")
"""Not on Windows: there each trace is a process that starts from nothing."""


class Workshop:
    """Traces requests; use it as a context, so that nothing is left behind.

    `live` returns the objects of this very process (a notebook's model): traces are then forked from here. Otherwise
    one child process serves all. It forks for each trace, but not with Keras: TensorFlow cannot be forked.
    """

    def __init__(
        self,
        live: Callable[[], Any] | None = None,
        timeout: float = child.TIMEOUT,
    ) -> None:
        if live is not None:
            _must_fork("the objects of a running process")
            import_module("buoy.estimate.tracing.steps")  # every trace needs it: once here, not in each fork
        self._live = live
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="buoy-plan-")
        self._said = os.path.join(self._folder.name, "said.txt")
        self._announced = os.path.join(self._folder.name, "announced.txt")
        self._stage: subprocess.Popen[str] | None = None
        self._known: dict[str, Trace | BuoyError] = {}
        self._count = 0
        self._script: tuple[str, list[str]] = ("", [])

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and remove its files."""
        if self._stage is not None:
            try:
                os.killpg(self._stage.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            self._stage.communicate()
            self._stage = None
        self._folder.cleanup()

    @property
    def traces(self) -> int:
        """How many traces were made."""
        return len(self._known)

    def trace(self, request: Request) -> Trace:
        """The trace; raises EstimateError with the reason when it cannot be made."""
        self.prepare([request])
        found = self._known[request.to_json()]
        if isinstance(found, BuoyError):
            raise found
        return found

    def prepare(self, requests: Sequence[Request]) -> None:
        """Have these traces made, in parallel where they can be; `trace` then answers at once."""
        wanted = list({r.to_json(): r for r in requests if r.to_json() not in self._known}.values())
        alone = [r for r in wanted if not _FORKS or (r.framework == "keras" and r.autocast is not None)]
        together = [request for request in wanted if request not in alone]
        for request in alone:
            self._known[request.to_json()] = _or_error(partial(self._in_own_process, request))
        if together:
            for request, path in zip(together, self._order(together), strict=True):
                self._known[request.to_json()] = path if isinstance(path, BuoyError) else Trace.load(path)

    def flops(self, request: Request) -> dict[str, float] | None:
        """Floating-point operations of a forward pass; None where they cannot be counted."""
        if request.framework != "torch" or not _FORKS:
            return None
        try:
            path = self._order([request], count_flops=True)[0]
            if isinstance(path, BuoyError):
                return None
            with open(path, encoding="utf-8") as file:
                counted: dict[str, float] = json.load(file)
            return counted
        except (OSError, ValueError):
            return None

    def run_script(
        self, script: str, arguments: list[str], framework: str = "torch", precision: str | None = None
    ) -> dict[str, Any]:
        """Run a script in the child up to its first optimizer step; traces then start from there.

        Returns what it does besides the step itself: `{"accumulate", "autocast"}`. `precision` is a policy of Keras.
        """
        _must_fork("an unmodified script")
        result = self._new_result()
        self._script = (script, arguments)
        answer = self._ask(
            {
                "script": os.path.abspath(script),
                "arguments": arguments,
                "framework": framework,
                "precision": precision,
                "result": result,
                "timeout": self._timeout,
            }
        )
        if answer["code"] != 0:
            raise self._why(answer["code"], result, child.LEAST_MEMORY)
        found: dict[str, Any] = answer["found"]
        return found

    def _in_own_process(self, request: Request) -> Trace:
        """Keras decides on the precision where a layer is made: in a process of its own, a script is run again."""
        if "script" not in request.source:
            return child.trace(request, timeout=self._timeout)
        with Workshop(timeout=self._timeout) as other:
            policy = "mixed_float16" if request.autocast == "fp16" else "mixed_bfloat16"
            other.run_script(*self._script, "keras", policy)
            return other.trace(replace(request, autocast=None))

    def _order(self, requests: Sequence[Request], count_flops: bool = False) -> list[str | BuoyError]:
        """Have them done; for each the path of its result, or why there is none."""
        results = [self._new_result() for _ in requests]
        memory = child.most_memory()
        order = {"requests": [request.to_json() for request in requests], "results": results, "memory": memory,
                 "timeout": self._timeout, "count_flops": count_flops, "framework": requests[0].framework,
                 "announced": self._announced}  # fmt: skip
        codes: list[int | None]
        if self._live is not None:
            live = ModuleType(LIVE)
            live.build = self._live  # type: ignore[attr-defined]

            def seeing(work: Callable[[], None]) -> None:
                sys.modules[LIVE] = live
                work()

            works = [partial(seeing, work) for work in stage.works(order)]
            codes = forked(works, self._said, self._timeout, self._pass_on)
        else:
            answer = self._ask(order)
            codes = answer.get("codes", [answer.get("code")] * len(results))
        return [
            result if code == 0 and os.path.exists(result) else self._why(code, result, memory)
            for code, result in zip(codes, results, strict=True)
        ]

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._stage is None:
            self._stage = subprocess.Popen(
                [sys.executable, "-m", "buoy.planner.stage", self._folder.name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
                stderr=subprocess.DEVNULL, env=child.environment(),
            )  # fmt: skip
        process = self._stage
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return {"code": process.wait()}
        # The stage ends a trace that takes too long; it is itself bounded too, for what hangs outside of one.
        longest = self._timeout * len(order.get("requests", "1")) + 60
        end = time.monotonic() + longest
        ready: list[Any] = []
        while not ready and time.monotonic() < end:
            ready, _, _ = select.select([process.stdout], [], [], min(_LOOK_EVERY, longest))
            self._pass_on()
        line = process.stdout.readline() if ready else None
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        os.killpg(process.pid, signal.SIGKILL)
        self._stage = None
        code = process.wait()
        return {"code": None if line is None else code}

    def _pass_on(self) -> None:
        """What a tracing process wants the user to know while they wait: once, as every trace of the step says it."""
        if self._announced and os.path.exists(self._announced):
            with open(self._announced, encoding="utf-8") as file:
                text = file.readline().strip()
            if text:
                clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # a line of progress may stand there
                sys.stderr.write(f"{clear}buoy: {text}\n")
                self._announced = ""

    def _new_result(self) -> str:
        self._count += 1
        return os.path.join(self._folder.name, f"{self._count}.json.gz")

    def _why(self, code: int | None, result: str, memory: int) -> BuoyError:
        return child.failure(code, result, self._said, limit=memory, timeout=self._timeout)


def _must_fork(what: str) -> None:
    if not _FORKS:
        raise UsageError(
            f"{what} cannot be planned on {this_system()}",
            expected="Linux or macOS, where a process can be forked",
            hint="write a function that returns a model and a batch: `buoy plan train.py:build`",
        )


def _or_error(make: Callable[[], Trace]) -> Trace | BuoyError:
    try:
        return make()
    except BuoyError as error:
        return error
