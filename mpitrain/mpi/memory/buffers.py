"""The one guarded way from a tensor to an MPI message.

Invariants: every mpi4py call that touches a tensor gets it from here. By itself, mpi4py takes a bfloat16 tensor
for 16-bit integers and silently sums it into garbage, and it cannot wait for the
kernels that still write device memory. So dtypes come from a table, types that MPI cannot add are refused
for reductions and travel as unsigned integers otherwise, layouts other than dense and contiguous are
refused or copied, and device memory is waited for and, where this MPI cannot read it (`device_aware.py`), staged
through pinned host memory (`staging.py`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.memory.device_aware import FORCED, gpu_aware
from mpitrain.mpi.memory.staging import Accelerator, Pool, TorchDevice

IN_PLACE = MPI.IN_PLACE
MAX_COUNT = 2**31 - 1  # MPI counts are C ints; collectives over more elements go in pieces (`pieces`)

_ARITHMETIC: dict[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.bool: MPI.C_BOOL,
}
_CARRIERS = {2: torch.uint16, 1: torch.uint8}  # moved bit by bit: bfloat16, float16, the 8-bit floats


class Message(list[Any]):
    """An mpi4py message [memory, count, datatype] that keeps its tensor alive while MPI works on it."""

    owner: torch.Tensor

    def blocks(self, num_ranks: int) -> "Message":
        """The same memory as equal blocks, one a rank, for Allgather and Alltoall.

        mpi4py takes the count of a message for the count of one block there, and writes past the end
        without a check.
        """
        memory, count, datatype = self
        assert count % num_ranks == 0, (count, num_ranks)
        message = Message([memory, count // num_ranks, datatype])
        message.owner = self.owner
        return message


def as_buffer(tensor: torch.Tensor, *, reduction: bool = False) -> Message:
    """The mpi4py message for a host tensor's own memory: no copy, MPI reads and writes the tensor itself.

    With `reduction` MPI will calculate with it: bfloat16 and other types it cannot add are refused. Raises
    TypeError for dtypes and layouts that cannot travel, ValueError for strided memory or more than 2^31-1
    elements.
    """
    _check_layout(tensor)
    if _accelerator.owns(tensor):
        raise TypeError(
            f"tensor on {tensor.device}: device memory needs buffers.lease(), which waits for its kernels"
        )
    flat = tensor.detach().view(-1)
    carrier, datatype = _wire_type(tensor.dtype, reduction)
    if carrier is not None:
        flat = flat.view(carrier)
    message = Message([flat.numpy(), flat.numel(), datatype])
    message.owner = tensor
    return message


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its numbers, one behind the other in host memory, and there are some; and whether they may be
    written in any mode."""
    return (
        tensor.layout == torch.strided
        and not on_device(tensor)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor.is_inference()
        and 0 < tensor.numel() <= MAX_COUNT
    )


def bytes_of_plain(tensor: torch.Tensor) -> "MPI.buffer":
    """The memory of a plain tensor, which the caller keeps alive."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def message_of_plain(tensor: torch.Tensor) -> Message:
    """The mpi4py message for the bytes of a plain tensor."""
    message = Message([bytes_of_plain(tensor), tensor.nbytes, MPI.BYTE])
    message.owner = tensor
    return message


def of_plain(tensor: torch.Tensor) -> list[Any]:
    """`as_buffer` for a blocking reduction of a plain tensor, which the caller keeps alive."""
    return [bytes_of_plain(tensor), tensor.numel(), _wire_type(tensor.dtype, True)[1]]


def _wire_type(dtype: torch.dtype, reduction: bool) -> tuple[torch.dtype | None, "MPI.Datatype"]:
    """(carrier dtype or None, MPI datatype) for `dtype`."""
    datatype = _ARITHMETIC.get(dtype)
    if datatype is not None:
        return None, datatype
    carrier = _CARRIERS.get(dtype.itemsize) if dtype.is_floating_point else None
    if carrier is None:
        raise TypeError(f"{dtype} tensors cannot travel over MPI; convert to one of {_known()}")
    if reduction:
        raise TypeError(f"MPI cannot add {dtype} (it would sum the bits as integers); reduce in float32")
    return carrier, _ARITHMETIC[carrier]


def _known() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _ARITHMETIC)


def check_travels(tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor whose bytes are not its numbers, or whose numbers MPI does not carry."""
    _wire_type(tensor.dtype, False)
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"a {tensor.layout} tensor of {tensor.dtype} cannot travel over MPI; make it dense first"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(
            "a lazily conjugated or negated tensor cannot travel over MPI; call resolve_conj()/resolve_neg()"
        )


def _check_layout(tensor: torch.Tensor) -> None:
    check_travels(tensor)
    if not tensor.is_contiguous():
        raise ValueError(
            f"strided tensor {tuple(tensor.shape)}, strides {tensor.stride()}: call .contiguous() first"
        )
    if tensor.numel() > MAX_COUNT:
        raise ValueError(
            f"{tensor.numel()} elements in one message, MPI counts up to {MAX_COUNT}: send it in pieces"
        )


def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The contiguous tensor as flat views of at most MAX_COUNT elements."""
    if tensor.numel() <= MAX_COUNT:  # nearly always, and split is slow
        return [tensor] if tensor.numel() else []
    return list(tensor.detach().view(-1).split(MAX_COUNT))


# ---- tensors of any place and layout

_accelerator: Accelerator = TorchDevice()
_pool = Pool(_accelerator)


def use_accelerator(accelerator: Accelerator) -> None:
    """Replace the device that staging serves (tests put a stand-in here)."""
    global _accelerator, _pool
    _accelerator, _pool = accelerator, Pool(accelerator)


def on_device(tensor: torch.Tensor) -> bool:
    """True if the tensor lies in device memory."""
    return _accelerator.owns(tensor)


def adds_on_device() -> bool:
    """Whether MPI's own reductions of device memory are worth calling. Open MPI's copy it to plain host memory, add
    there and copy back: on an H100, of 25 and 100 MB, in 4 and 2.5 times the time of our pinned copies around the same
    sum (`benchmarks/gpu.py`); MPITRAIN_GPU_BUFFERS=on calls them all the same."""
    able, why = gpu_aware()
    return able and (why == FORCED or not MPI.Get_library_version().startswith("Open MPI"))


def record_event(tensor: torch.Tensor) -> Any:
    """Call where the tensor is handed over: what was queued for it so far must finish before MPI looks at it."""
    return _accelerator.record_event(tensor) if _accelerator.owns(tensor) else None


def record_events(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """That of each."""
    return [record_event(tensor) for tensor in tensors]


class Lease:
    """A tensor lent to MPI. `memory` is what MPI works on: the tensor itself, or a host copy. `messages()` are its
    mpi4py messages, `finish()` brings the results home when MPI is done."""

    def __init__(self, memory: torch.Tensor, finish: Callable[[], None]):
        self.memory = memory
        self.finish = finish

    def messages(self, *, reduction: bool = False) -> list[Message]:
        """One message per MAX_COUNT elements; see `as_buffer` for what is refused."""
        return [message_of(piece, reduction=reduction) for piece in pieces(self.memory)]


def message_of(memory: torch.Tensor, *, reduction: bool = False) -> Message:
    """The mpi4py message for (a piece of) leased memory, which may lie on a device that this MPI can read."""
    if not _accelerator.owns(memory) or not gpu_aware()[0]:
        return as_buffer(memory, reduction=reduction)
    _check_layout(memory)
    carrier, datatype = _wire_type(memory.dtype, reduction)
    raw = MPI.buffer.fromaddress(memory.data_ptr(), memory.numel() * memory.element_size())
    message = Message([raw, memory.numel(), datatype])
    message.owner = memory
    return message


def lease(
    tensor: torch.Tensor,
    *,
    reads: bool,
    writes: bool,
    after: object = None,
    on_host: bool = False,
    adds: bool = False,
) -> Lease:
    """Lend a tensor of any place and layout to MPI, in the thread that owns MPI.

    `reads`: MPI reads its present contents. `writes`: MPI will write it, and `finish()` makes that visible
    in `tensor`. `after` is what `record_event(tensor)` gave in the thread that computed it. `on_host`: the caller
    computes with the memory itself, so stage it even if this MPI can read device memory. `adds`: MPI is to add in it. A
    dense host tensor costs nothing.
    """
    tensor = tensor.detach()
    if not _accelerator.owns(tensor):
        return _lease_host(tensor, writes)
    _accelerator.wait_for(after if after is not None else _accelerator.record_event(tensor))
    if not on_host and tensor.is_contiguous() and (adds_on_device() if adds else gpu_aware()[0]):
        return Lease(tensor, lambda: _accelerator.wait_for(_accelerator.record_event(tensor)))
    return _lease_staged(tensor, reads, writes)


def lease_all(tensors: Iterable[torch.Tensor], events: Iterable[object], *, writes: bool) -> list[Lease]:
    """`lease` of each, on the host, for MPI to write them or else to read them."""
    return [
        lease(tensor, reads=not writes, writes=writes, after=event, on_host=True)
        for tensor, event in zip(tensors, events)
    ]


def _lease_host(tensor: torch.Tensor, writes: bool) -> Lease:
    memory = tensor.contiguous()

    def finish() -> None:
        if writes and memory is not tensor:
            tensor.copy_(memory)

    return Lease(memory, finish)


def _lease_staged(tensor: torch.Tensor, reads: bool, writes: bool) -> Lease:
    num_bytes = tensor.numel() * tensor.element_size()
    raw = _pool.take(num_bytes)
    memory = raw[:num_bytes].view(tensor.dtype).view(tensor.shape)
    if reads:
        _accelerator.copy(memory, tensor)

    def finish() -> None:
        if writes:
            _accelerator.copy(tensor, memory)
        _pool.give(raw)

    return Lease(memory, finish)
