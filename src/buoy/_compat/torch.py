"""PyTorch's private names. Checked on 2.6 to 2.13."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize
from torch.utils.data import dataloader

from buoy._compat import borrowed, lacking, patched

try:
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
except ImportError:  # pragma: no cover - no version without them is known
    lacking("torch.utils._python_dispatch", "operations cannot be watched")
    TorchDispatchMode = nullcontext  # type: ignore[assignment,misc]
    _disable_current_modes = nullcontext  # type: ignore[assignment]
try:
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
except ImportError:  # pragma: no cover - no version without them is known
    lacking("torch.utils._pytree", "only lists, tuples and dictionaries are looked into")

    def tree_flatten(tree: Any) -> Any:  # type: ignore[misc]
        """Leaves, and what gives them their shape back (not known here)."""
        return tree_leaves(tree), None

    def tree_leaves(tree: Any) -> list[Any]:  # type: ignore[misc]
        """Every member that is no list, tuple or dictionary."""
        if isinstance(tree, (list, tuple, dict)):
            inner = tree.values() if isinstance(tree, dict) else tree
            return [leaf for each in inner for leaf in tree_leaves(each)]
        return [tree]

    def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:  # type: ignore[misc]
        """The same with each leaf replaced."""
        if isinstance(tree, dict):
            return {key: tree_map(function, value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(tree_map(function, value) for value in tree)
        return function(tree)


__all__ = ["TorchDispatchMode", "tree_flatten", "tree_leaves", "tree_map"]

BatchNorm = _BatchNorm
"""The class of all BatchNorm layers. No public name stands for it."""
NormBase = _NormBase
"""The class of BatchNorm and InstanceNorm layers: those with running statistics."""

# --- tensors


def version_of(tensor: Any) -> int:
    """How often a tensor's memory was written (`_version`); -1 where torch does not count (inference tensors)."""
    return -1 if tensor.is_inference() else int(tensor._version)


VERSION: Callable[[Any], int] = attrgetter("_version")
"""The same, to be mapped over tensors at every step; an inference tensor is a RuntimeError."""


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The same for many."""
    return list(map(VERSION, tensors))


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Undo the counting of writes that left the same values; without it autograd refuses a graph that is still good."""
    change = borrowed(
        torch._C._autograd, "_unsafe_set_version_counter", None, "a restored buffer counts as written"
    )
    if change is not None:
        change(tuple(tensors), tuple(versions))


def copy_all(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """Many copies in one call (`_foreach_copy_`), which autograd does not record; else one by one."""
    together = getattr(torch, "_foreach_copy_", None)
    # Between two steps `with torch.no_grad()` takes longer than copying a network's batch statistics.
    is_recorded = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        if together is not None:
            together(into, source)
            return
        for there, here in zip(into, source, strict=True):
            there.copy_(here)
    finally:
        torch._C._set_grad_enabled(is_recorded)


def storage_key(storage: Any) -> int:
    """What tells an `untyped_storage()` from every other that lives (`_cdata`), also where it has no address (fake)."""
    return int(storage._cdata)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether it shares another tensor's memory for autograd."""
    return bool(tensor._is_view())


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """Hooks on its gradient: `register_hook` and `register_post_accumulate_grad_hook`; nothing public lists them."""
    found = (getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return [hook for hooks in found if hooks for hook in hooks.values()]


@contextmanager
def without_gradient_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[bool]:
    """Hooks on these gradients do nothing; gives whether there were any."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    found = [hooks for p in parameters for name in names if (hooks := getattr(p, name, None))]
    kept = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.clear()
    try:
        yield bool(found)
    finally:
        for hooks, those in zip(found, kept, strict=True):
            hooks.update(those)


def accumulation_hooks(parameter: torch.Tensor) -> Any:
    """Those of `register_post_accumulate_grad_hook` alone: an optimizer may step in them."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


# --- modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, to be replaced in place."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers, to be replaced in place."""
    return module._buffers


def unsaved_buffers(module: nn.Module) -> set[str]:
    """The names of its buffers that `state_dict` leaves out (`persistent=False`); without it none is known."""
    found: set[str] = borrowed(
        module, "_non_persistent_buffers_set", set(), "buffers with persistent=False are not restored"
    )
    return found


def original_module(model: Any) -> Any:
    """What `torch.compile` wrapped; None for any other."""
    return getattr(model, "_orig_mod", None)


COMPILED = "_orig_mod."
"""What `torch.compile` puts into the names of a model's state."""
EXTRA_STATE = "_extra_state"
"""The key of what `get_extra_state` of a module returns."""


def loads_as_usual(module: nn.Module) -> bool:
    """Whether its own state is loaded by torch's way alone, which copies."""
    own = type(module)._load_from_state_dict is nn.Module._load_from_state_dict
    return own and not getattr(module, "_load_state_dict_pre_hooks", None)


def is_fsdp_shard(tensor: object) -> bool:
    """A parameter that FSDP flattened: a part of the whole."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def forget_parametrizations() -> None:
    """Drop what `parametrize.cached()` keeps from one forward pass to the next."""
    if getattr(parametrize, "_cache_enabled", 0):
        parametrize._cache.clear()


# --- random numbers


def is_same_generator(one: torch.Generator, other: torch.Generator) -> bool:
    """A dispatch mode gets another Python object for it. Without the address draws from any generator are refused."""
    address = getattr(one, "_cdata", None)
    return one is other or (address is not None and address == getattr(other, "_cdata", None))


PYTHON_RNG: Any = getattr(random, "_inst", None) or random.Random()  # noqa: S311 - not for secrets
"""The generator behind `random.random()`."""


def numpy_rng() -> Any:
    """The generator behind `numpy.random.rand()`; None where numpy is not loaded."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.mtrand._rand


def vendor() -> str:
    """The name of a device that another package brought along (`privateuseone` where none did)."""
    name = getattr(torch._C, "_get_privateuse1_backend_name", None)
    return "privateuseone" if name is None else str(name())


def has_xpu() -> bool:
    """Whether torch was built for Intel's GPUs; where it does not say so, that it was."""
    return bool(getattr(getattr(torch, "xpu", None), "_is_compiled", lambda: True)())


# --- data loaders


def has_usual_passes(loader: Any) -> bool:
    """Whether a DataLoader's iterators are torch's own."""
    return type(loader)._get_iterator is dataloader.DataLoader._get_iterator


def loader_iterators() -> Any:
    """The class of a DataLoader's iterators, whose `__next__` waits for data; None: waiting is not measured."""
    return borrowed(dataloader, "_BaseDataLoaderIter", None, "the time that steps wait for data is not shown")


def forget_workers(loader: Any) -> None:
    """A loader with persistent workers starts others in its next pass: its own are gone, or another loader's."""
    if getattr(loader, "_iterator", None) is not None:
        object.__setattr__(loader, "_iterator", None)


WORKERS_BEGIN = "_reset"


def worker_iterators() -> Any:
    """The class of a DataLoader's iterators with workers, whose `_reset` begins a pass of workers that stay; None."""
    found = getattr(dataloader, "_MultiProcessingDataLoaderIter", None)
    if hasattr(found, WORKERS_BEGIN):
        return found
    lacking(
        "_MultiProcessingDataLoaderIter._reset", "persistent workers make a resume differ after evaluations"
    )
    return None


# --- operations


def schema_of(operation: Any) -> Any:
    """What an operation takes and gives (`OpOverload._schema`)."""
    return operation._schema


def without_modes() -> AbstractContextManager[Any]:
    """Dispatch modes are set aside: what is done inside is not watched."""
    return _disable_current_modes()


def is_in_backward() -> bool:
    """Whether autograd's engine runs in this thread."""
    number = getattr(torch._C, "_current_graph_task_id", None)
    return number is not None and number() != -1


def backward_node_number() -> int | None:
    """The number of the node whose backward runs; None: none does."""
    node = getattr(torch._C, "_current_autograd_node", lambda: None)()
    return None if node is None else int(node._sequence_nr())


def next_node_number() -> int:
    """The number that the next node of autograd's graph will have, in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


# --- optimizers and scalers

OPTIMIZER_MARKS = ("_opt_called", "_step_count")
"""What schedulers note on an optimizer."""


def mark_stepped(optimizer: Any) -> None:
    """What a scheduler's wrapper around `step` would have noted: it warns when it was not called."""
    optimizer._opt_called = True


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Whether this `optimizer.step` is a scheduler's wrapper."""
    return bool(getattr(step, "_wrapped_by_lr_sched", False))


def step_hooks(optimizer: Any, when: str) -> list[Any]:
    """The hooks around an optimizer's step, everybody's and its own; `when` is "pre" or "post"."""
    from torch.optim import optimizer as module

    everywhere = getattr(module, f"_global_optimizer_{when}_hooks", {})
    own = getattr(optimizer, f"_optimizer_step_{when}_hooks", {})
    return [*everywhere.values(), *own.values()]


def scaler_tensors(scaler: Any) -> list[torch.Tensor | None]:
    """A GradScaler's scale and growth counter, which its update writes; None before its first use."""
    return [getattr(scaler, name, None) for name in SCALER_FIELDS]


SCALER_FIELDS = ("_scale", "_growth_tracker")


def scaler_stages(scaler: Any) -> dict[int, dict[str, Any]]:
    """What a GradScaler knows of each optimizer in this step: whether it was unscaled or stepped."""
    found: dict[int, dict[str, Any]] = borrowed(
        scaler, "_per_optimizer_states", {}, "a scaler's failed step is not retried"
    )
    return found


# --- distributed


def joins(replica: Any) -> bool:
    """Whether DDP runs inside `join()`: ranks may end at different steps."""
    return bool(getattr(getattr(replica, "_join_config", None), "enable", False))


def rebuild_buckets(replica: Any) -> None:
    """DDP's own preparation of a step's exchange, which its forward makes."""
    replica.reducer._rebuild_buckets()


def sync_buffers(replica: Any) -> None:
    """DDP's broadcast of buffers, which its forward makes."""
    replica._sync_buffers()


# --- CUDA, and the profiler


def is_profiled() -> bool:
    """Whether a profiler is at work in this process: a second one would end it. Not known, no."""
    ask = getattr(torch.autograd, "_profiler_enabled", None)
    return bool(ask is not None and ask())


def set_allocator(settings: str) -> bool:
    """Change the allocator's settings in a process that has used it; whether that could be done."""
    change = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if change is not None:
        change(settings)
    return change is not None


# --- tracing, in a child process that a plan starts


def fake_tensors() -> Any:
    """The module of fake tensors (`FakeTensorMode`, `FakeTensor`). A plan of PyTorch code cannot do without it."""
    from torch._subclasses import fake_tensor

    return fake_tensor


def load_compiler() -> None:
    """Load torch's compiler: loaded inside a step, it leaves frames behind that hold the step's tensors."""
    import torch._dynamo  # noqa: F401


def destroy(library: Any) -> None:
    """Take a `torch.library.Library`'s kernels away again before it is collected."""
    library._destroy()


def without_key(key: Any) -> AbstractContextManager[Any]:
    """The kernels of one dispatch key are passed over."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))
    return guard


def autocast_key() -> Any:
    """The dispatch key of CUDA's autocast."""
    return torch._C.DispatchKey.AutocastCUDA


def operations_without_cuda(cuda_only: set[str]) -> Iterator[str]:
    """Operations that this build would take apart on CUDA although they have kernels there."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if (
            name.startswith("aten::")
            and has(name, "CompositeImplicitAutograd")
            and (has(name, "CPU") or name in cuda_only)
            and not has(name, "CUDA")
        ):
            yield name.removeprefix("aten::")


@contextmanager
def answering_metadata(question: Any, answer: Callable[[Any], Any]) -> Iterator[None]:
    """What fake tensors answer when C++ asks one of their properties."""
    handlers = fake_tensors()._DISPATCH_META_HANDLERS
    before = handlers[question]
    handlers[question] = answer
    try:
        yield
    finally:
        handlers[question] = before


def foreach_operations(names: Iterable[str]) -> Iterator[Any]:
    """The in-place operations on many tensors at once (`torch._foreach_add_` and so on), in all their overloads."""
    for name in names:
        operation = getattr(torch.ops.aten, f"_foreach_{name}_")
        for overload in operation.overloads():
            yield getattr(operation, overload)


def _operation(name: str) -> Any:
    """An operation's overloads; None where this version has none of that name: nothing runs it then."""
    return getattr(torch.ops.aten, name, None)


FOREACH_SQRT: Any = getattr(_operation("_foreach_sqrt"), "default", None)
READ_VALUE: Any = getattr(_operation("_local_scalar_dense"), "default", None)
"""What `tensor.item()` asks."""
LOG_SOFTMAX = _operation("_log_softmax")
SOFTMAX = _operation("_softmax")
"""The kernels that read half precision and write float32."""
FLASH_ATTENTION = _operation("_scaled_dot_product_flash_attention")
EFFICIENT_ATTENTION = _operation("_scaled_dot_product_efficient_attention")
SAFE_SOFTMAX = _operation("_safe_softmax")
ATTENTION: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention
"""What `torch.nn.functional.scaled_dot_product_attention` is, under the name that others import."""

# Names of operations as they are seen by a dispatch mode.
FLASH_ATTENTION_NAME = "_scaled_dot_product_flash_attention"
EFFICIENT_ATTENTION_NAME = "_scaled_dot_product_efficient_attention"
SAFE_SOFTMAX_NAME = "_safe_softmax"
MATMULS_IN_FLOAT8 = ("_scaled_mm",)
COMPILER = "torch._dynamo"
"""The module of torch's compiler, whose import takes seconds."""
UNSAFE_VIEW = "_unsafe_view"
TO_COPY = "_to_copy"
COLLECTIVES = "_c10d_functional"
"""The namespace of functional collectives."""
AUTOCAST_LOWER = ("_convolution", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
"""Operations on CUDA autocast's list that no one calls by name."""


@contextmanager
def steps_always(fake: type) -> Iterator[None]:
    """A GradScaler steps whatever the gradients are, and optimizers treat fake parameters as CUDA's."""
    from torch.optim import optimizer as optimizers

    def step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    kinds = getattr(optimizers, "_foreach_supported_types", [])
    with (
        patched(torch.amp.GradScaler, "_maybe_opt_step", step),
        patched(optimizers, "_foreach_supported_types", [*kinds, fake]),
    ):
        yield


@contextmanager
def modes_in_backward(mode: Any) -> Iterator[None]:
    """Function modes are set aside while `Tensor.backward` runs; inside, this one is not."""
    run = torch.autograd.graph._engine_run_backward

    def engine(*args: Any, **kwargs: Any) -> Any:
        if mode in torch.overrides._get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            return run(*args, **kwargs)
        with mode:
            return run(*args, **kwargs)

    with (
        patched(torch.autograd, "_engine_run_backward", engine),
        patched(torch.autograd.graph, "_engine_run_backward", engine),
    ):
        yield


CAUSAL_QUESTION = ("torch.nn.modules.transformer", "_detect_is_causal_mask")
"""How `nn.Transformer` asks whether a mask is causal, by its values."""
