"""What programs that know nothing of us ask of a group: inference mode, sparse gradients, checkpoints, joins."""

import tempfile
import threading
import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch._C._distributed_c10d import ErrorType
from torch.distributed import _functional_collectives as functional
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import mpitrain
from mpitrain import torch_versions
from mpitrain.mpi.engine.collective_queue import LEFT_GROUP
from mpitrain.mpi.process_group import base, point_to_point
from tests.mpi.cases import raises, run_cases, starts

warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames all_gather_into_tensor


@starts
def case_ours_on_every_device_is_ours(rt):
    """A backend by device, which torch would ask the environment to bring together."""
    dist.init_process_group("cpu:mpi4py,cuda:mpi4py")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rt.rank, rt.size, "mpi4py")


def case_a_programs_own_mpi_calls_beside_works(rt):
    """mpi4py itself, untouched, while Works are under way; then the Works are as they would have been."""
    from mpi4py import MPI

    comm, engine = MPI.COMM_WORLD.Dup(), rt.engine
    assert comm.allgather({1: (2, rt.rank)}) == [{1: (2, rank)} for rank in range(rt.size)]  # its own pickle
    for turn in range(20):
        tensors = [torch.full((count,), float(rt.rank + turn)) for count in (3, 200_000)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        received = torch.zeros(4)
        late = dist.irecv(received, (rt.rank - 1) % rt.size)  # sent behind the block: nothing waits for it
        with mpitrain.exclusive_mpi():
            assert engine.owns_mpi and all(work.is_completed() for work in works)
            assert comm.allgather(rt.rank + turn) == [rank + turn for rank in range(rt.size)]
            with mpitrain.exclusive_mpi():
                inside = torch.ones(2)
                dist.all_reduce(inside)
                assert inside.tolist() == [rt.size] * 2 and engine.owns_mpi
            assert engine.owns_mpi
        assert not engine.owns_mpi
        dist.send(torch.full((4,), float(turn)), (rt.rank + 1) % rt.size)
        late.wait()
        assert received.tolist() == [turn] * 4
        for tensor in tensors:
            assert tensor.unique().tolist() == [sum(range(rt.size)) + turn * rt.size]
    comm.Free()


def case_a_block_of_its_own_ends_with_an_error_and_in_another_thread(rt):
    def leave_by_an_error():
        with mpitrain.exclusive_mpi():
            raise LookupError("of the caller's own")

    raises(LookupError, "of the caller's own", leave_by_an_error)
    owned = []

    def own():
        with mpitrain.exclusive_mpi():
            owned.append(rt.engine.owns_mpi)

    thread = threading.Thread(target=own)
    with mpitrain.exclusive_mpi():
        thread.start()
        thread.join(0.05)
        assert owned == []  # one thread at a time
    thread.join(30)
    assert owned == [True] and not rt.engine.owns_mpi
    dist.barrier()


def case_a_receive_from_any_rank_is_warned_of_where_it_may_never_end(rt):
    got = torch.zeros(2)
    over_ucx = mock.patch.object(point_to_point.MPI, "Get_library_version", lambda: "MPICH ch4:ucx")
    with (
        mock.patch.object(rt, "may_miss_from_any", True),
        over_ucx,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        if rt.rank == 0:
            assert [dist.recv(got) for _ in range(1, rt.size)] and got.sum() > 0
        else:
            dist.send(torch.full((2,), float(rt.rank)), 0)
    assert sum("name the rank" in str(one.message) for one in told) == (rt.size - 1 if rt.rank == 0 else 0)


def case_every_collective_in_inference_mode(rt):
    """What is made in the mode may be written in it only, and it is not the caller's thread that writes; strided ones
    and those of 16 bits are written by a copy."""
    n, total = rt.size, float(sum(range(rt.size)))
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for own in (
                torch.full((6, 2), float(rt.rank), dtype=dtype),
                torch.full((6, 4), float(rt.rank), dtype=dtype)[:, ::2],
            ):
                dist.all_reduce(own)
                assert own.unique().tolist() == [total]
                own.fill_(rt.rank)
                dist.all_reduce(own, op=dist.ReduceOp.AVG)
                assert own.unique().tolist() == [torch.tensor(total / n, dtype=dtype).item()]
                own.fill_(rt.rank)
                dist.broadcast(own, n - 1)
                assert own.unique().tolist() == [n - 1.0]
                own.fill_(rt.rank)
                slots = [torch.empty_like(own) for _ in range(n)]
                dist.all_gather(slots, own)
                assert [slot.unique().tolist() for slot in slots] == [[float(rank)] for rank in range(n)]
                whole, part = torch.empty(6 * n, 2, dtype=dtype), torch.empty(6, 2, dtype=dtype)
                dist.all_gather_into_tensor(whole, own)
                dist.reduce_scatter_tensor(part, whole)
                assert part.unique().tolist() == [float(rt.rank * n)]
                dist.all_to_all_single(whole, whole.clone())
                assert whole.unique().tolist() == [float(rt.rank)]
                dist.gather(own, slots if rt.rank == 0 else None)
                dist.scatter(own, slots if rt.rank == 0 else None)
                dist.reduce(own, 0)
                assert own.unique().tolist() == [total if rt.rank == 0 else float(rt.rank)]
                if rt.rank == 0:
                    dist.send(own, 1)
                if rt.rank == 1:
                    dist.recv(own, 0)
                    assert own.unique().tolist() == [total]
    normal = torch.ones(3, requires_grad=True)
    product = normal * 2
    with torch.inference_mode():
        dist.all_reduce(product.detach())
    product.sum().backward()  # is still autograd's
    assert normal.grad is not None and product.tolist() == [2.0 * n] * 3


def case_averages_of_whole_numbers_round_down(rt):
    for dtype in (torch.int64, torch.int32, torch.uint8):
        own = torch.tensor([rt.rank, 7 * rt.rank, 1], dtype=dtype)
        dist.all_reduce(own, op=dist.ReduceOp.AVG)
        total = sum(range(rt.size))
        assert own.tolist() == [total // rt.size, 7 * total // rt.size, 1]
    own = torch.tensor([-1 if rt.rank == 0 else 0])
    dist.all_reduce(own, op=dist.ReduceOp.AVG)
    assert own.tolist() == [-1]


def sparse(rank, dtype=torch.float32):
    """Rows 0, 2 and 2, with other values on every rank; none on rank 1."""
    rows = torch.tensor([[rank % 5, 2, 2]] if rank != 1 else [[]], dtype=torch.int64)
    values = torch.arange(rows.shape[1] * 2, dtype=dtype).view(-1, 2) + rank
    return torch.sparse_coo_tensor(rows, values, (5, 2), check_invariants=True)


def with_entries(rank, count):
    """So many different rows of 100,000, of one float32 each."""
    draw = torch.Generator().manual_seed(rank)
    rows, values = torch.randperm(100_000, generator=draw)[:count], torch.randn(count, 1, generator=draw)
    return torch.sparse_coo_tensor(rows[None], values, (100_000, 1), check_invariants=True)


def case_sparse_tensors_are_added_up(rt):
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        dense = sum(sparse(rank, torch.float64).to_dense() for rank in range(rt.size)).to(dtype)
        for inference in (False, True):
            with torch.inference_mode(inference):
                own = sparse(rt.rank, dtype)
                dist.all_reduce(own)
                assert own.is_sparse and torch.equal(own.to_dense(), dense)
    own = sparse(rt.rank, torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.AVG)
    assert torch.equal(
        own.to_dense(), sum(sparse(rank, torch.float64).to_dense() for rank in range(rt.size)) / rt.size
    )
    both = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG}
    for name, op in (
        both.items() if rt.size > 1 else ()
    ):  # many ranks' entries, few different: added up by an allreduce
        shape, rows = (3, 70_000, 2), torch.tensor([[2, 0], [69_999, 7]])
        own = torch.sparse_coo_tensor(rows, torch.tensor([[1.0, 2], [3, 4]]) * (rt.rank + 1), shape)
        dist.all_reduce(own, op=op)
        total = sum(range(1, rt.size + 1)) / (rt.size if name == "mean" else 1)
        assert own.is_coalesced() and own.indices().tolist() == [[0, 2], [7, 69_999]]
        assert own.values().tolist() == [[3 * total, 4 * total], [total, 2 * total]]
    for many in (0, 20_000, 40_000):  # of rank 0 alone: they fit beside those of the others, or do not
        parts = [with_entries(rank, 5 if rank else many) for rank in range(rt.size)]
        own, dense = parts[rt.rank].clone(), torch.zeros(100_000, 1)
        for part in parts:  # in the order of the ranks
            dense.index_add_(0, part.coalesce().indices()[0], part.coalesce().values())
        dist.all_reduce(own)
        assert own.is_coalesced() and torch.equal(own.to_dense(), dense), many
    raises(TypeError, "SUM or AVG", lambda: dist.all_reduce(sparse(rt.rank), op=dist.ReduceOp.MAX))
    raises(TypeError, "COO", lambda: dist.group.WORLD.allreduce([sparse(rt.rank), torch.ones(2)]))


def case_ddp_over_a_sparse_embedding(rt):
    """The mean of the ranks' gradients, as of one process with all their rows."""
    torch.manual_seed(3)
    serial = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
    ours = nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
    ours.load_state_dict(serial.state_dict())
    module = DistributedDataParallel(ours)
    ids = [torch.tensor([rank, 5, 5, 2 * rank]) for rank in range(rt.size)]
    for _ in range(2):
        module(ids[rt.rank]).square().sum().backward()
        (sum(serial(each).square().sum() for each in ids) / rt.size).backward()
        assert ours.weight.grad.is_sparse
        assert torch.allclose(ours.weight.grad.to_dense(), serial.weight.grad.to_dense(), rtol=1e-14, atol=0)
        for module_ in (ours, serial):
            torch.optim.SGD(module_.parameters(), lr=0.1).step()
            module_.zero_grad()


def case_joins_of_uneven_inputs(rt):
    """Rank r has r + 2 batches; torch divides by the ranks that still have some."""
    for by_all in (False, True):
        ours = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(ours.weight)
        module = DistributedDataParallel(ours)
        with module.join(divide_by_initial_world_size=by_all):
            for _ in range(rt.rank + 2):
                ours.zero_grad()
                module(torch.full((1, 2), float(rt.rank + 1), dtype=torch.float64)).sum().backward()
        present = range(rt.rank, rt.size)  # at this rank's last batch
        expected = sum(rank + 1 for rank in present) / (rt.size if by_all else len(present))
        wanted = torch.full((1, 2), expected, dtype=torch.float64)
        assert torch.allclose(ours.weight.grad, wanted, rtol=1e-14), (by_all, ours.weight.grad)


def case_checkpoints_ask_for_the_devices(rt):
    assert torch.device("cpu") in dist.group.WORLD._device_types
    place = rt.broadcast(tempfile.mkdtemp() if rt.rank == 0 else None)
    saved = {"a": torch.full((3,), 7.0)}
    checkpoint.async_save(saved, checkpoint_id=place).result()
    found = {"a": torch.zeros(3)}
    checkpoint.load(found, checkpoint_id=place)
    assert torch.equal(found["a"], saved["a"])
    torch.manual_seed(rt.rank)
    module, full = nn.Linear(3, 2), nn.Linear(3, 2).state_dict() if rt.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, full, options=options)
    every = [torch.empty(2, 3) for _ in range(rt.size)]
    dist.all_gather(every, module.weight.detach())
    assert all(torch.equal(one, every[0]) for one in every)
    if rt.rank == 0:
        assert torch.equal(every[0], full["weight"])


def case_monitored_barrier_by_its_own_name(rt):
    dist.monitored_barrier()
    group = dist.new_group(list(range(rt.size)))
    limit = timedelta(seconds=0.3)
    if rt.rank == 0:
        missing = "Ranks 1" if rt.size == 2 else "Ranks 1, 2"
        for error in (TimeoutError, RuntimeError):  # torch's gloo raises the second
            raises(
                error,
                f"{missing} failed to pass monitoredBarrier in 300 ms",
                lambda: dist.monitored_barrier(group, limit, wait_all_ranks=True),
            )
        raises(RuntimeError, "Rank 1 failed to pass", lambda: group.monitored_barrier(0.3))
        raises(RuntimeError, "Rank 0 timed out in monitoredBarrier", lambda: group.monitored_barrier(0))
    subgroup = dist.new_group([0])
    dist.monitored_barrier(subgroup, limit)  # for ranks outside it there is nothing to do
    dist.barrier()
    if rt.rank == 1:
        raises(
            RuntimeError, "Rank 1 successfully reached monitoredBarrier", lambda: group.monitored_barrier(0.3)
        )


def case_the_profiler_shows_collectives(rt):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(4))
        dist.broadcast(torch.ones(4), 0)
    keys = {event.key for event in profile.key_averages()}
    assert {"mpi4py:all_reduce", "mpi4py:broadcast"} <= keys, keys
    later = dist.irecv(torch.zeros(2), (rt.rank + 1) % rt.size)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        work = dist.all_gather_into_tensor(torch.zeros(3 * rt.size, 2), torch.ones(3, 2), async_op=True)
        dist.send(torch.ones(2), (rt.rank - 1) % rt.size)
        work.wait()
        unfinished = dist.irecv(torch.zeros(5), (rt.rank + 1) % rt.size, tag=1)
    spans = {span.name: span for span in profile.function_events if span.name.startswith("mpi4py:")}
    assert spans["mpi4py:all_gather"].input_shapes == [[3, 2]]
    assert spans["mpi4py:all_gather"].is_async == torch_versions.spans_end_elsewhere()
    assert spans["mpi4py:send"].input_shapes == [[2]], spans
    dist.send(torch.ones(5), (rt.rank - 1) % rt.size, tag=1)
    later.wait()
    unfinished.wait()  # its span has no profile to go to
    with CommDebugMode() as counted:
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert counted.get_total_counts() == 1


def case_nothing_is_converted_and_nothing_is_written_twice(rt):
    """Refused before anything travels, so the next collective is in order."""
    expanded = torch.ones(1).expand(4)
    wide = torch.empty(3 * rt.size, dtype=torch.float64)
    raises(ValueError, "one place", lambda: dist.all_reduce(expanded))
    raises(ValueError, "one place", lambda: dist.all_gather([expanded] * rt.size, torch.ones(4)))
    raises(TypeError, "converts nothing", lambda: dist.all_gather_into_tensor(wide, torch.ones(3)))
    raises(TypeError, "converts nothing", lambda: dist.reduce_scatter_tensor(torch.ones(3), wide))
    raises(
        TypeError,
        "converts nothing",
        lambda: dist.group.WORLD.allgather([list(wide.split(3))], [torch.ones(3)]),
    )
    source = torch.ones(1).expand(4) if rt.rank == 0 else torch.zeros(4)
    dist.broadcast(source, 0)  # the root's is only read
    assert source.tolist() == [1.0] * 4


def case_a_thread_that_waits_for_a_message_gives_way(rt):
    """It drives MPI until the message is here, which is sent after the block only."""
    from mpi4py import MPI

    own, inbox = MPI.COMM_WORLD.Dup(), torch.zeros(1)
    after, before = (rt.rank + 1) % rt.size, (rt.rank - 1) % rt.size
    waiting = threading.Thread(target=dist.irecv(inbox, before, tag=5).wait)
    waiting.start()
    raises(KeyError, "within", lambda: _calls_within(own))
    dist.isend(torch.full((1,), 7.0), after, tag=5).wait()
    waiting.join()
    assert inbox.item() == 7.0
    with mpitrain.exclusive_mpi():
        own.Free()


def _calls_within(comm):
    with mpitrain.exclusive_mpi():
        assert comm.allgather({"rank": comm.rank}) == [{"rank": rank} for rank in range(comm.size)]
        raise KeyError("within")


def case_every_question_of_torch_has_an_answer(rt):
    """Those of later torch, too, which would otherwise ask a backend of C++ that is not there."""
    group = dist.new_group(list(range(rt.size)))
    names = ("splitting", "coalescing", "time_estimate", "shrinking", "reconfigure", "window")
    supported = {name: getattr(group, f"supports_{name}") for name in names}
    assert supported == dict.fromkeys(names, False) | {"coalescing": True}
    assert group.get_backend(torch.device("cpu")) is group and group.get_error() == ErrorType.SUCCESS
    raises(RuntimeError, "no windows", group.new_window)
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
    dist.all_gather_into_tensor(torch.zeros(2 * rt.size), torch.ones(2), group=group)
    dist.barrier(group)
    assert (before, group._get_sequence_number_for_group()) == (0, 4)
    got = torch.zeros(rt.size, 2)
    options = dist.GatherOptions()
    options.rootRank = 1
    group.gather_single(got, torch.full((2,), float(rt.rank)), options).wait()
    assert got.tolist() == [[float(rank) * (rt.rank == 1)] * 2 for rank in range(rt.size)]
    dist.destroy_process_group(group)


def case_hooks_are_called_before_a_group_ends_and_it_says_why(rt):
    def hooked(timeout):
        group, called = dist.new_group(list(range(rt.size)), timeout=timeout), threading.Event()
        group.register_abort_hook(1, called.set)
        group.register_abort_hook(2, lambda: raises(AssertionError, "", called.set))
        group.unregister_abort_hook(2)
        return group, called

    group, called = hooked(timedelta(seconds=0.3))
    if rt.rank:
        rt.barrier()
    inbox = torch.zeros(1)
    if rt.rank == 0:  # a message that comes too late ends nothing
        raises(TimeoutError, "timed out", lambda: dist.recv(inbox, 1, group=group))
        assert group.get_error() == ErrorType.SUCCESS and not called.is_set()
    raises(TimeoutError, "", lambda: dist.all_reduce(torch.ones(2), group=group))
    assert called.wait(60) and group.get_error() == ErrorType.TIMEOUT
    if not rt.rank:
        rt.barrier()
    dist.destroy_process_group(group)
    group, called = hooked(timedelta(seconds=60))
    group.abort()
    assert called.is_set() and group.get_error() == ErrorType.SUCCESS
    dist.barrier()


def case_a_group_that_was_left_refuses(rt):
    group = dist.new_group(list(range(rt.size)))
    dist.destroy_process_group(group)
    for use in (
        lambda: group.allreduce([torch.ones(2)]),
        lambda: group.send([torch.ones(2)], (rt.rank + 1) % rt.size),
        lambda: group.monitored_barrier(),
    ):
        raises(RuntimeError, "has left this process group", use)
    dist.barrier()


def case_a_rank_that_leaves_waits_for_the_others(rt):
    """One after another: whoever has left calls mpi4py itself next, and no other thread may be inside MPI then."""
    group = dist.new_group(list(range(rt.size)))
    leave = type(group).leave

    def leave_and_tell(group):
        op = leave(group)
        if rt.rank < rt.size - 1:
            rt.engine.wait(rt.engine.isend(b"1", rt.rank + 1, 77))
        return op

    if rt.rank > 0:
        rt.engine.wait(rt.engine.irecv(bytearray(1), rt.rank - 1, 77))
    with mock.patch.object(type(group), "leave", leave_and_tell):
        dist.destroy_process_group(group)
    assert not rt.engine.outstanding
    dist.barrier()


def case_a_rank_that_leaves_does_not_wait_for_ever(rt):
    group = dist.new_group(list(range(rt.size)))
    with mock.patch.object(base, "LEAVE_S", 0.05):
        if rt.rank == 0:
            dist.destroy_process_group(group)
            assert [op.what for op in rt.engine.outstanding if op.kind == "collective"] == [LEFT_GROUP]
        dist.barrier()
        if rt.rank > 0:
            dist.destroy_process_group(group)
    dist.barrier()
    rt.engine.wait_any(lambda: not rt.engine.outstanding)


run_cases(globals())
