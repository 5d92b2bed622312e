"""Tensors on the wire: the dtype table, what is refused, strided memory, staging with a stand-in for a GPU."""

import os
from functools import partial
from unittest import mock

import torch

from mpitrain.errors import UsageError
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.memory import buffers, device_aware
from mpitrain.mpi.process_group.broadcast import broadcast_tensors
from tests.mpi.cases import raises, run_cases

INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
FLOATS = [torch.float32, torch.float64]
CARRIED = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]


def bits(tensor):
    return (
        tensor.contiguous().view(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )


def random(dtype, *shape):
    raw = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return raw.view(dtype).view(shape) if dtype != torch.bool else raw.view(shape) > 127


def exchange(rt, outgoing, incoming):
    """Rank 0's tensor to every other rank, by one message each."""
    if rt.rank == 0:
        ops = [rt.engine.isend(outgoing, rank, 1) for rank in range(1, rt.size)]
    else:
        ops = [rt.engine.irecv(incoming, 0, 1)]
    rt.engine.wait(*ops, timeout_s=30)


def case_every_dtype_arrives_bit_for_bit(rt):
    """All bit patterns, NaNs included, of every dtype that may travel; also no dimension and no elements."""
    for dtype in INTEGERS + FLOATS + CARRIED + COMPLEX + [torch.bool]:
        for shape in ((7, 5), (), (0, 3)):
            sent = random(dtype, *shape)
            got = torch.zeros_like(sent)
            exchange(rt, sent, got)
            assert rt.rank == 0 or torch.equal(bits(got), bits(sent)), (dtype, shape)


def case_small_tensors_of_a_dtype_are_broadcast_together(rt):
    """Two thousand tensors of 100 numbers are one collective for each dtype and 4 MB, not one for each tensor; strided
    ones, scalars, empty ones and one that is too large to be packed arrive bit for bit."""
    small = [torch.full((100,), float(number)) for number in range(2000)]
    others = [torch.arange(12).view(3, 4).t(), torch.tensor(7), torch.zeros(0, 3, dtype=torch.int64)]
    large = torch.arange(1 << 21, dtype=torch.float32)
    sent = [*small[:1000], *others, torch.ones(3, dtype=torch.float8_e5m2), *small[1000:], large]
    got = sent if rt.rank == 1 else [torch.zeros_like(one) for one in sent]
    with mock.patch.object(rt, "collective", wraps=rt.collective) as collective:
        broadcast_tensors(rt, got, root=1)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got, sent, strict=True))
    assert collective.call_count == 4  # integers, eight bits, small floats, the large one
    with mock.patch.object(rt, "collective", wraps=rt.collective) as collective:
        broadcast_tensors(rt, [torch.zeros(100) for _ in range(20_000)])
    assert collective.call_count == 2  # 8 MB


def case_sums_are_right_for_every_dtype(rt):
    """What MPI adds, it adds as the dtype says: equal to torch's own sum over ranks."""
    for dtype in INTEGERS + FLOATS + COMPLEX:
        mine = [torch.tensor([1, 2, 3 + rank], dtype=torch.int64).to(dtype) for rank in range(rt.size)]
        total = mine[rt.rank].clone()
        rt.comm.Allreduce(MPI.IN_PLACE, buffers.as_buffer(total, reduction=True), MPI.SUM)
        assert total.tolist() == [sum(m.tolist()[i] for m in mine) for i in range(3)], dtype
    flag = torch.tensor([rt.rank == 1, False])
    rt.comm.Allreduce(MPI.IN_PLACE, buffers.as_buffer(flag, reduction=True), MPI.LOR)
    assert flag.tolist() == [True, False]


def case_sixteen_bit_floats_are_refused_for_reductions(rt):
    """mpi4py alone would add their bits as integers and say nothing."""
    for dtype in CARRIED:
        reduce = partial(buffers.as_buffer, torch.ones(2).to(dtype), reduction=True)
        raises(TypeError, "reduce in float32", reduce)


def case_the_trap_exists(rt):
    """Why bfloat16 is refused: mpi4py alone gives garbage. If this ever fails, mpi4py has learned it."""
    total = torch.ones(4, dtype=torch.bfloat16)
    try:
        rt.comm.Allreduce(MPI.IN_PLACE, total)
    except (BufferError, KeyError, TypeError, ValueError, MPI.Exception):
        return
    assert total.float().tolist() != [float(rt.size)] * 4


def case_layouts_that_cannot_travel_are_refused(rt):
    """Strided, sparse, quantised, lazily conjugated, foreign dtypes, too many elements: each with a way out."""
    raises(ValueError, ".contiguous()", lambda: buffers.as_buffer(torch.ones(4, 4).t()))
    raises(ValueError, ".contiguous()", lambda: buffers.as_buffer(torch.ones(1).expand(3)))
    raises(TypeError, "dense", lambda: buffers.as_buffer(torch.eye(3).to_sparse()))
    raises(TypeError, "resolve_conj", lambda: buffers.as_buffer(torch.ones(3, dtype=torch.complex64).conj()))
    raises(TypeError, "complex32", lambda: buffers.as_buffer(torch.ones(3, dtype=torch.complex32)))
    limit, buffers.MAX_COUNT = buffers.MAX_COUNT, 4
    try:
        raises(ValueError, "pieces", lambda: buffers.as_buffer(torch.ones(5)))
        assert len(buffers.as_buffer(torch.ones(4))) == 3
    finally:
        buffers.MAX_COUNT = limit


def case_parameters_need_no_detach(rt):
    """A leaf that requires grad travels by its own memory."""
    weight = torch.nn.Parameter(torch.full((3,), float(rt.rank + 1)))
    exchange(rt, weight, weight)
    assert weight.tolist() == [1.0] * 3 and weight.requires_grad


def case_a_message_is_the_memory_itself(rt):
    """No copy: MPI writes the tensor that was handed over, and the message keeps it alive."""
    got = torch.zeros(1000)
    message = buffers.as_buffer(got)
    address = got.data_ptr()
    if rt.rank:
        op = rt.engine.irecv(message, 0, 2)
        del got, message
        rt.barrier()
        rt.engine.wait(op, timeout_s=30)
        assert op.buffer.owner.data_ptr() == address and op.buffer.owner.eq(3).all()
    else:
        rt.barrier()
        rt.engine.wait(
            *[rt.engine.isend(torch.full((1000,), 3.0), rank, 2) for rank in range(1, rt.size)], timeout_s=30
        )


def case_leases_of_strided_memory(rt):
    """A lease copies what is strided, and brings results home to exactly the elements of the view."""
    base = torch.full((4, 6), -1.0)
    view = base[:, ::2]
    if rt.rank == 0:
        view.copy_(torch.arange(12.0).view(4, 3))
    held = buffers.lease(view, reads=rt.rank == 0, writes=rt.rank != 0)
    for message in held.messages():
        rt.comm.Bcast(message, 0)
    held.finish()
    assert torch.equal(view, torch.arange(12.0).view(4, 3))
    assert base[:, 1::2].eq(-1).all()


def case_pieces_cover_everything_once(rt):
    """A tensor beyond the count limit goes in several messages (the limit is lowered here)."""
    limit, buffers.MAX_COUNT = buffers.MAX_COUNT, 1000
    try:
        tensor = torch.arange(3500.0) * (rt.rank == 0)
        held = buffers.lease(tensor, reads=rt.rank == 0, writes=rt.rank != 0)
        messages = held.messages()
        assert [m[1] for m in messages] == [1000, 1000, 1000, 500]
        for message in messages:
            rt.comm.Bcast(message, 0)
        assert torch.equal(tensor, torch.arange(3500.0))
        assert buffers.lease(torch.ones(0), reads=True, writes=True).messages() == []
    finally:
        buffers.MAX_COUNT = limit


class Stand:
    """A device whose memory MPI must not touch: its tensors are garbage until `wait_for`, as while kernels run."""

    def __init__(self):
        self.log, self.device, self.num_pinned = [], set(), 0

    def put(self, tensor):
        self.device.add(tensor.untyped_storage().data_ptr())
        return tensor

    def owns(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.device

    def pinned(self, num_bytes):
        self.num_pinned += 1
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_event(self, tensor):
        self.log.append("event")
        return "kernels done"

    def wait_for(self, event):
        assert event == "kernels done"
        self.log.append("wait")

    def copy(self, target, source):
        self.log.append("down" if self.owns(source) else "up")
        assert self.owns(source) != self.owns(target)
        target.copy_(source)


def staged(function):
    """Run a case with a stand-in device, and the MPI not GPU-aware."""

    def run(rt):
        stand = Stand()
        before = buffers._accelerator
        buffers.use_accelerator(stand)
        os.environ["MPITRAIN_GPU_BUFFERS"] = "off"
        device_aware.gpu_aware.cache_clear()
        try:
            function(rt, stand)
        finally:
            buffers.use_accelerator(before)
            del os.environ["MPITRAIN_GPU_BUFFERS"]
            device_aware.gpu_aware.cache_clear()

    return run


@staged
def case_device_tensors_are_staged_in_order(rt, stand):
    """Wait for the kernels, copy down, MPI, copy up; what is not read is not copied down."""
    tensor = stand.put(torch.full((100,), float(rt.rank + 1)))
    raises(TypeError, "lease", lambda: buffers.as_buffer(tensor))
    event = buffers.record_event(tensor)
    held = buffers.lease(tensor, reads=True, writes=True, after=event)
    assert not stand.owns(held.memory)
    for message in held.messages(reduction=True):
        rt.comm.Allreduce(MPI.IN_PLACE, message, MPI.SUM)
    held.finish()
    assert stand.log == ["event", "wait", "down", "up"]
    assert tensor.eq(rt.size * (rt.size + 1) / 2).all()
    stand.log.clear()
    held = buffers.lease(tensor, reads=rt.rank == 0, writes=rt.rank != 0)
    for message in held.messages():
        rt.comm.Bcast(message, 0)
    held.finish()
    assert stand.log == ["event", "wait", "down" if rt.rank == 0 else "up"]


@staged
def case_pinned_buffers_are_reused(rt, stand):
    """Pinning is dear: a thousand transfers of one size pin one buffer, two at a time pin two."""
    tensor = stand.put(torch.arange(3000.0))
    for _ in range(1000):
        buffers.lease(tensor, reads=True, writes=False).finish()
    assert stand.num_pinned == 1
    leases = [buffers.lease(tensor, reads=True, writes=False) for _ in range(2)]
    assert stand.num_pinned == 2
    assert leases[0].memory.data_ptr() != leases[1].memory.data_ptr()
    for held in leases:
        assert torch.equal(held.memory, tensor)
        held.finish()
    for dtype, shape in ((torch.bfloat16, (5, 7)), (torch.float64, ()), (torch.int64, (0, 2))):
        held = buffers.lease(stand.put(torch.ones(shape, dtype=dtype)), reads=True, writes=False)
        assert held.memory.dtype == dtype and held.memory.shape == shape
        held.finish()


@staged
def case_a_gpu_aware_mpi_gets_the_device_memory(rt, stand):
    """No staging then, but still a wait for the kernels, and one after for what followed MPI."""
    os.environ["MPITRAIN_GPU_BUFFERS"] = "on"
    device_aware.gpu_aware.cache_clear()
    tensor = stand.put(torch.full((10,), float(rt.rank == 0)))
    held = buffers.lease(tensor, reads=rt.rank == 0, writes=rt.rank != 0, after=buffers.record_event(tensor))
    for message in held.messages():
        rt.comm.Bcast(message, 0)
    held.finish()
    assert stand.log == ["event", "wait", "event", "wait"] and stand.num_pinned == 0
    assert tensor.eq(1).all()
    assert not stand.owns(buffers.lease(tensor, reads=True, writes=False, on_host=True).memory)
    strided = stand.put(torch.zeros(4, 4))[:, 1]
    assert not stand.owns(buffers.lease(strided, reads=True, writes=True).memory)
    # unless it is asked to, Open MPI adds nothing there
    assert stand.owns(buffers.lease(tensor, reads=True, writes=True, adds=True).memory)
    aware, buffers.gpu_aware = buffers.gpu_aware, lambda: (True, "the library says so")
    try:
        assert stand.owns(buffers.lease(tensor, reads=True, writes=True).memory)
        direct = stand.owns(buffers.lease(tensor, reads=True, writes=True, adds=True).memory)
        assert direct != MPI.Get_library_version().startswith("Open MPI")
    finally:
        buffers.gpu_aware = aware


def case_gpu_awareness_ladder(rt):
    """The override wins; a wrong word is told; the wheels here say no, and say why."""
    for value, verdict in (("on", True), ("off", False)):
        os.environ["MPITRAIN_GPU_BUFFERS"] = value
        device_aware.gpu_aware.cache_clear()
        assert device_aware.gpu_aware() == (verdict, f"MPITRAIN_GPU_BUFFERS={value}")
    os.environ["MPITRAIN_GPU_BUFFERS"] = "maybe"
    device_aware.gpu_aware.cache_clear()
    raises(UsageError, "on, off or auto", device_aware.gpu_aware)
    del os.environ["MPITRAIN_GPU_BUFFERS"]
    device_aware.gpu_aware.cache_clear()
    verdict, why = device_aware.gpu_aware()
    assert not verdict and "Query_cuda_support()=0" in why, why
    for kinds, granted in (
        ("mpi,system", False),
        ("system,cuda:device", True),
        ("cuda:host", False),
        ("rocm", True),
    ):
        assert device_aware.grants_device(kinds) == granted, kinds
    assert not device_aware.grants_device("cuda:device", ["rocm"])


class Library:
    """An MPI library that has some of the functions."""

    def __init__(self, **said):
        for name, value in said.items():
            setattr(self, name, lambda value=value: value)

    def answering(self, number):
        """Also MPICH's general one, for one kind."""

        def query(kind, answer):
            answer._obj.value = int(kind.value == number)
            return 0

        self.MPIX_GPU_query_support = query
        return self


def case_a_kind_of_memory_is_asked_for_by_its_own_name(rt):
    open_mpi = Library(MPIX_Query_cuda_support=0, MPIX_Query_rocm_support=1)
    mpich, older = Library(MPIX_Query_ze_support=1, MPIX_Query_hip_support=0), Library().answering(1)
    found = {
        kind: [device_aware.answers(library, kind) for library in (open_mpi, mpich, older, Library())]
        for kind in device_aware.KINDS
    }
    general = "MPIX_GPU_query_support"
    assert found == {
        "cuda": [[("MPIX_Query_cuda_support()", False)], [], [(f"{general}(cuda)", False)], []],
        "rocm": [
            [("MPIX_Query_rocm_support()", True)],
            [("MPIX_Query_hip_support()", False)],
            [(f"{general}(rocm)", False)],
            [],
        ],
        "level_zero": [[], [("MPIX_Query_ze_support()", True)], [(f"{general}(level_zero)", True)], []],
    }


def case_where_a_library_says_nothing_its_variables_do(rt):
    for variables, kind, able in (
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, "level_zero", True),
        ({"MPICH_GPU_SUPPORT_ENABLED": "0"}, "cuda", False),
        ({"MV2_USE_CUDA": "1"}, "cuda", True),
        ({"MV2_USE_CUDA": "1"}, "rocm", None),
        ({"I_MPI_OFFLOAD": "1"}, "level_zero", True),
        ({"I_MPI_OFFLOAD": "1"}, "cuda", False),
        ({"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "cuda"}, "cuda", True),
        ({"I_MPI_OFFLOAD": "0"}, "level_zero", False),
        ({}, "cuda", None),
    ):
        with mock.patch.dict(os.environ, variables):
            answer = device_aware._environment([kind])
        assert (None if answer is None else answer[0]) is able, (variables, kind, answer)


def case_devices_that_mpi_knows_nothing_of_are_staged(rt):
    with mock.patch.object(device_aware.accelerator, "kind", lambda: "mps"):
        device_aware.gpu_aware.cache_clear()
        assert device_aware.gpu_aware() == (
            False,
            "MPI knows no memory of 'mps' devices, so their tensors go through host memory",
        )
    device_aware.gpu_aware.cache_clear()


if __name__ == "__main__":
    run_cases(globals())
