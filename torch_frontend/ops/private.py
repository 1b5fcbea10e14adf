"""Every private name of torch that this package uses, each with a public way to the same result; symmetric.py has the
private names for memory that GPUs map, and for copies to this memory.

A private name is faster or sees more; where torch lacks it, the public way runs. The choice is made once, at import.
This is not a version shim: both ways compute the same bytes on the same torch, and
tests/torch_frontend/ops/test_private.py runs both.
"""

import pkgutil
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ... import cpp_bindings


def private(name: str) -> Any:
    """The object named "module:attribute", or None if this torch has no such name."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


# --- Launching on a GPU ---


def _public_empty_cuda(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# Allocates without the dispatcher, as the programs of torch.compile do.
empty_cuda: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor] = (
    private("torch._C._dynamo.guards:_empty_strided_cuda") or _public_empty_cuda
)
"""empty_cuda(shape, strides, dtype): an uninitialized tensor on the current GPU."""

# The C function behind `torch.cuda.current_device`, without the check for lazy initialization.
current_gpu: Callable[[], int] = private("torch._C:_cuda_getDevice") or torch.cuda.current_device
"""The index of the current GPU."""


def _public_raw_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# Returns the address alone; the public function builds a Stream object per call.
raw_stream: Callable[[int], int] = private("torch._C:_cuda_getCurrentRawStream") or _public_raw_stream
"""raw_stream(index): the address of the current CUDA stream of GPU `index`."""

# --- Profiles ---


def _public_profiling() -> bool:
    return True


# A range costs 13 us even without a profiler; no public name tells whether there is one.
profiling: Callable[[], bool] = private("torch.autograd:_profiler_enabled") or _public_profiling
"""Whether a profiler of this thread is running."""

# --- Reading tensors ---


def _public_layouts(tensors: tuple[Any, ...]) -> Hashable | None:
    if not all(isinstance(t, Tensor) and t.layout == torch.strided for t in tensors):
        return None
    return tuple((t.shape, t.dtype, t.device, t.stride(), t.data_ptr() % 16 if t.is_cuda else 0) for t in tensors)


# DLPack's table of C functions reads a tensor without a Python call.
_has_exchange = private("torch:Tensor.__dlpack_c_exchange_api__") is not None
exchange = cpp_bindings.Exchange(Tensor) if _has_exchange else None
"""Reads tensors in C++; None without DLPack's table, and then no op runs in CUDA C++ (`no_cuda_launch`)."""
layouts: Callable[[tuple[Any, ...]], Hashable | None] = _public_layouts if exchange is None else exchange.layouts
"""layouts(tensors): equal for tensors of equal shapes, dtypes, devices, strides and, on a GPU, equal addresses modulo
16. None if one of them has no strides, or is of a dtype that DLPack lacks."""
no_cuda_launch = "" if exchange else "allowed: triton; torch.Tensor has no __dlpack_c_exchange_api__ for a CUDA launch"
"""Why the CUDA C++ ops cannot be launched on this torch; "" if they can."""


def _public_is_fake(x: Tensor) -> bool:
    return x.untyped_storage().device.type == "meta"


# Sees through functional tensors too; the public function does not.
is_fake: Callable[[Tensor], bool] = private("torch._subclasses.fake_tensor:is_fake") or _public_is_fake
"""is_fake(x): whether x has a shape and no values, as in a FakeTensorMode."""


def _private_owner(x: Tensor) -> Tensor:
    return x if x._base is None else x._base


def _public_owner(x: Tensor) -> Tensor:
    return x.detach()


# No public name leads from a view to the tensor that it views.
owner_of: Callable[[Tensor], Tensor] = _public_owner if private("torch:Tensor._base") is None else _private_owner
"""owner_of(x): the tensor that x views, or x; if unknown a new leaf, of which nothing is assumed."""


def _private_version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _public_version(x: Tensor) -> int:
    local = x.to_local() if isinstance(x, DTensor) else x
    return hash(local.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())


# Autograd's counter of writes in place; the public way reads all values on the host.
has_version = private("torch:Tensor._version") is not None
"""Whether `version_of` is autograd's counter of writes, which is 0 before the first one."""
version_of: Callable[[Tensor], int] = _private_version if has_version else _public_version
"""version_of(x): a number that changes when the values of x do; an inference tensor's number may not."""

# --- Tensor subclasses and torch.func ---


def _public_wrapper(cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    memory = torch.empty(shape, dtype=dtype, device=device)
    memory.untyped_storage().resize_(0)
    return memory.as_subclass(cls)


def _private_wrapper(cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


# The public way makes a tensor and frees its memory, which a FakeTensorMode does not allow.
wrapper: Callable[..., Any] = (
    _public_wrapper if private("torch:Tensor._make_wrapper_subclass") is None else _private_wrapper
)
"""wrapper(cls, shape, dtype, device): an instance of a subclass of Tensor without memory."""


def _public_torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return Tensor.__torch_function__(func, (Tensor,), args, kwargs)


# A constant that torch tests for in C++, so that no Python function is called.
unwrapped_results: Any = private("torch._C:_disabled_torch_function_impl") or classmethod(_public_torch_function)
"""A `__torch_function__` that leaves results as they are, instead of wrapping them in the subclass."""


def _public_transformed() -> bool:
    return False


# Without it torch raises its own RuntimeError for an autograd.Function inside a transform.
transformed: Callable[[], bool] = private("torch._C:_are_functorch_transforms_active") or _public_transformed
"""Whether a transform of torch.func is active."""

# --- Memory of a backward ---


def _public_release_saved(ctx: Any) -> None:
    pass


# Without it what a function has saved lives until its backward returns.
release_saved: Callable[[Any], None] = (
    private("torch._C:_FunctionBase.maybe_clear_saved_tensors") or _public_release_saved
)
"""release_saved(ctx): in a backward, drop the references to saved tensors, unless the graph is retained."""

# --- torch.compile ---


def _public_check(condition: Any) -> None:
    if not condition:
        raise RuntimeError("mxep: shapes: got sizes that differ; allowed: equal sizes")


# Records a symbolic size for the run instead of guarding on it.
check: Callable[[Any], None] = private("torch:_check") or _public_check
"""check(condition): raise RuntimeError unless a condition of sizes holds; a compiled program may do so as it runs."""

_dynamo_config = private("torch._dynamo.config")
_has_capture = private("torch._dynamo.config:capture_scalar_outputs") is not None


def _private_captures_splits() -> bool:
    return _dynamo_config.capture_scalar_outputs


def _public_captures_splits() -> bool:
    return False


# No public name tells; without it the graph breaks where splits are read.
captures_splits = _private_captures_splits if _has_capture else _public_captures_splits
"""Whether torch.compile keeps sizes that are read from tensors as symbols."""


# --- Registration of ops ---


class Dispatcher(NamedTuple):
    """What register.py needs to look at a call before the dispatcher does; the public way is
    `torch.library.custom_op`."""

    plain_keysets: frozenset[int]
    """Raw key sets of calls with plain CPU or CUDA tensors."""
    after_autograd: Any
    below_autograd: Callable[[], Any]
    any_requires_grad: Callable[..., bool]
    mark_not_compiled: Callable[[Callable[..., Any]], None]


def _dispatcher() -> Dispatcher | None:
    keysets, keys = private("torch._C:DispatchKeySet"), private("torch._C:DispatchKey")
    raw_repr = private("torch._C:DispatchKeySet.raw_repr")
    after_autograd = private("torch._C:_after_autograd_keyset")
    below_autograd = private("torch._C:_AutoDispatchBelowAutograd")
    any_requires_grad = private("torch._C:_any_requires_grad")
    redispatch, level = (
        private("torch._ops:OpOverload.redispatch"),
        private("torch.autograd.forward_ad:_current_level"),
    )
    set_strategy = private("torch._C._dynamo.eval_frame:set_code_exec_strategy")
    strategy = private("torch._C._dynamo.eval_frame:_FrameExecStrategy")
    action = private("torch._C._dynamo.eval_frame:_FrameAction")
    needed = keysets, keys, raw_repr, after_autograd, below_autograd, any_requires_grad, redispatch, level
    if any(name is None for name in (*needed, set_strategy, strategy, action)):
        return None

    def mark_not_compiled(function: Callable[..., Any]) -> None:
        set_strategy(function.__code__, strategy(action.SKIP, action.SKIP))

    plain = ((keys.CPU, keys.AutogradCPU), (keys.CUDA, keys.AutogradCUDA))
    raw = frozenset((keysets(kernel) | keysets(autograd)).raw_repr() for kernel, autograd in plain)
    return Dispatcher(raw, after_autograd, below_autograd, any_requires_grad, mark_not_compiled)


# A `custom_op` compares the storages of its outputs and inputs at every call.
dispatcher: Dispatcher | None = _dispatcher()
"""None if one of the names is missing."""


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open; for use with a `dispatcher` alone."""
    return forward_ad._current_level >= 0


# Modes of torch_dispatch see every op: fake tensors, counters of operations, selective checkpointing.
open_modes: Callable[[], int] | None = private("torch._C:_len_torch_dispatch_stack")
"""open_modes(): how many modes are open in this thread; None without the name."""


# --- Process groups ---

_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


def name_of_group(group: dist.ProcessGroup) -> str:
    """The group's name, by which `group_named` finds it."""
    if group_named is _public_group_named:
        _groups[group.group_name] = group
    return group.group_name


def _public_group_named(name: str) -> dist.ProcessGroup:
    world = dist.group.WORLD if dist.is_initialized() else None
    found = world if world is not None and world.group_name == name else _groups.get(name)
    if found is None:
        raise ValueError(name)
    return found


# torch's own table of groups; the public way finds the default group and those that came as objects.
group_named: Callable[[str], dist.ProcessGroup] = (
    private("torch.distributed.distributed_c10d:_resolve_process_group") or _public_group_named
)
"""group_named(name): the process group; raises RuntimeError or ValueError if there is none of that name."""


def _public_flattened(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.size() != dist.get_world_size():
        raise RuntimeError("mxep: mesh: got some of the ranks; allowed: all, on a torch without DeviceMesh._flatten")
    return init_device_mesh(mesh.device_type, (mesh.size(),))


def _private_flattened(mesh: DeviceMesh) -> DeviceMesh:
    return mesh._flatten()


# A mesh of some of the ranks, such as the ranks of a pipeline stage, is flattened by the private name alone.
_has_flatten = private("torch.distributed.device_mesh:DeviceMesh._flatten") is not None
flattened = _private_flattened if _has_flatten else _public_flattened
"""flattened(mesh): a mesh of one dim with the same ranks in the same order; collective."""


# --- FSDP2 ---

Phase = Literal["forward", "backward", "any"]
"""What reads the weights of an all-gather: a forward, a backward, or possibly both."""

_training_state: Any = private("torch.distributed.fsdp._fully_shard._fsdp_common:TrainingState")
_group_reshards = private("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._reshard_after_forward")
_state_of = private("torch.distributed.fsdp:FSDPModule._get_fsdp_state")
_graph_task = private("torch._C:_current_graph_task_id")


def _public_begin_gather(module: nn.Module, name: str) -> Phase:
    return "any"


def _private_begin_gather(module: nn.Module, name: str) -> Phase:
    state: Any = _state_of(module)
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else (state._fsdp_param_group,)
    for group in groups:
        for each in group.fsdp_params:
            if each._module_info.module is module and each._module_info.param_name == name:
                # torch keeps freed buffers of the first gather's sizes for all gathers.
                each.all_gather_outputs = []
                return _phase_of(group)
    return "any"


def _phase_of(group: Any) -> Phase:
    if not group._reshard_after_forward or not group.reshard_after_backward:
        return "any"
    if group._training_state is _training_state.FORWARD:
        return "forward" if _graph_task() == -1 else "any"  # in a backward: activation checkpointing
    return "backward" if group._training_state is _training_state.PRE_BACKWARD else "any"


_has_phase = None not in (_training_state, _group_reshards, _state_of, _graph_task)
# No public name tells for which pass FSDP2 gathers, or lets gathers of a parameter differ in size.
begin_gather: Callable[[nn.Module, str], Phase] = _private_begin_gather if _has_phase else _public_begin_gather
"""begin_gather(module, name): what reads the weights that FSDP2 is about to gather for a sharded parameter."""


def _public_all_to_all(
    x: Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup
) -> Tensor:
    received = x.new_empty((sum(output_splits), *x.shape[1:]))
    dist.all_to_all_single(received, x, output_splits, input_splits, group)
    return received


def _public_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def _private_all_to_all(x: Tensor, output_splits: list[int], input_splits: list[int], group: Any) -> Tensor:
    # The functional collective takes the host half a millisecond.
    if type(x) is Tensor and not torch.compiler.is_compiling() and open_modes is not None and not open_modes():
        return _public_all_to_all(x, output_splits, input_splits, group)
    return _collectives.wait_tensor(_collectives.all_to_all_single(x, output_splits, input_splits, group))


def _private_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _collectives.wait_tensor(_collectives.all_reduce(x, "sum", group))


def _public_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyones = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(everyones, x, group=group)
    return torch.cat(everyones)


def _private_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _collectives.wait_tensor(_gather_rows(x, 0, group))


# Collectives with a result of their own, which torch.compile traces.
_collectives = private("torch.distributed._functional_collectives")
_gather_single = private("torch.distributed._functional_collectives:all_gather_single")  # missing in torch 2.11
_gather_tensor = private("torch.distributed._functional_collectives:all_gather_tensor")  # deprecated in torch 2.13
_gather_rows: Any = _gather_single or _gather_tensor
all_to_all = _private_all_to_all if _collectives else _public_all_to_all
"""all_to_all(x, output_splits, input_splits, group): rows received; x is contiguous."""
all_reduce = _private_all_reduce if _collectives else _public_all_reduce
"""all_reduce(x, group): the sum of x over the ranks; x is contiguous and stays as it is."""
all_gather = _private_all_gather if _collectives and _gather_rows else _public_all_gather
"""all_gather(x, group): the rows x of all ranks, in the order of the ranks; x is contiguous."""
