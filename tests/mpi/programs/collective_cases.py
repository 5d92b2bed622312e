"""Every collective against NumPy's formula and against gloo on the same inputs, where gloo knows the dtype.

The inputs are small integers, exact in every dtype, so every order of adding gives the same bits and all comparisons
are for equality. MPITRAIN_TEST_NODES=2,1 makes the ranks believe in nodes of 2 and 1 ranks.
"""

import functools
import os
import random
import socket
import warnings
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist

import mpitrain  # noqa: F401  (this import is all a script needs)
from benchmarks.measuring.gloo import never_destroyed
from mpitrain.errors import MismatchError
from mpitrain.mpi.allreduce_plan import VARIABLE
from mpitrain.mpi.process_group.checksums import PayloadChecks, checksum_of
from tests.mpi.cases import run_cases, starts

warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames some of these
COUNTS = (0, 1, 7, 5003)
LARGE = 300_001
INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
REDUCIBLE = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)
MOVABLE = (*REDUCIBLE, torch.float8_e4m3fn, torch.float8_e5m2)
FORMULA = {
    "SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
    "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip
groups = {}


def kinds_of(dtype):
    if dtype == torch.bool or dtype in INTEGERS:
        return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return ("SUM", "AVG") if dtype.is_complex else ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


@functools.lru_cache(4096)
def draw(rank, count, salt):
    return np.random.default_rng([rank, count, salt]).integers(0, 4, count)


def values(rank, dtype, count, salt=0):
    """0 to 3, different on every rank; bool: half of them True; complex: with an imaginary part."""
    drawn = draw(rank, count, salt).copy()
    if dtype == torch.bool:
        return torch.from_numpy(drawn > 1)
    if dtype.is_complex:
        return torch.from_numpy(drawn + 1j * drawn[::-1]).to(dtype)
    return (
        torch.from_numpy(drawn).float().to(dtype)
        if dtype.is_floating_point
        else torch.from_numpy(drawn).to(dtype)
    )


def bits(tensor):
    """A NumPy array that is equal exactly where the tensors are."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def reduced(kind, tensors):
    """NumPy's reduction over the ranks, in the tensors' dtype."""
    dtype = tensors[0].dtype
    wide = [t.float().numpy() if dtype in (torch.float16, torch.bfloat16) else t.numpy() for t in tensors]
    formula = FORMULA[kind]
    if dtype == torch.bool:
        names = {"SUM": np.logical_or, "MAX": np.logical_or, "BOR": np.logical_or, "BXOR": np.logical_xor}
        formula = names.get(kind, np.logical_and)
    total = wide[0]
    for other in wide[1:]:
        total = formula(total, other)
    total = torch.from_numpy(np.ascontiguousarray(total))
    if kind == "AVG":
        (torch.view_as_real(total) if total.is_complex() else total).div_(len(tensors))
    return total.to(dtype)


def run(name, group, dtype, count, kind="SUM", root=0, salt=0):
    """One collective on `group`; what this rank then holds."""
    size, me = dist.get_world_size(group), dist.get_rank(group)
    op = getattr(dist.ReduceOp, kind)
    own = values(me, dtype, count, salt)
    if name == "allreduce":
        dist.all_reduce(own, op, group=group)
        return [own]
    if name == "reduce":
        dist.reduce(own, group_dst=root, op=op, group=group)
        return [own] if me == root else []
    if name == "reduce_scatter":
        out = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter(out, [values(me, dtype, count, salt + r) for r in range(size)], op, group=group)
        return [out]
    if name == "reduce_scatter_single":
        out = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter_tensor(out, values(me, dtype, count * size, salt), op, group=group)
        return [out]
    if name == "broadcast":
        dist.broadcast(own, group_src=root, group=group)
        return [own]
    if name == "allgather":
        slots = [torch.zeros(count + r, dtype=dtype) for r in range(size)]
        dist.all_gather(slots, values(me, dtype, count + me, salt), group=group)
        return slots
    if name == "all_gather_single":
        out = torch.zeros(count * size, dtype=dtype)
        dist.all_gather_into_tensor(out, own, group=group)
        return [out]
    if name == "gather":
        slots = [torch.zeros(count, dtype=dtype) for _ in range(size)] if me == root else None
        dist.gather(own, slots, group_dst=root, group=group)
        return slots or []
    if name == "scatter":
        out = torch.zeros(count, dtype=dtype)
        slots = [values(root, dtype, count, salt + r) for r in range(size)] if me == root else None
        dist.scatter(out, slots, group_src=root, group=group)
        return [out]
    if name == "alltoall":
        slots = [torch.zeros(count + r + me, dtype=dtype) for r in range(size)]
        dist.all_to_all(
            slots, [values(me, dtype, count + r + me, salt + r) for r in range(size)], group=group
        )
        return slots
    if name == "all_to_all_single":
        cuts = [count + r + me for r in range(size)]
        out = torch.zeros(sum(cuts), dtype=dtype)
        own = torch.cat([values(me, dtype, cut, salt + r) for r, cut in enumerate(cuts)])
        dist.all_to_all_single(out, own, cuts, cuts, group=group)
        return [out]
    assert name == "ring", name
    got = torch.zeros(count, dtype=dtype)
    after, before = (me + 1) % size, (me - 1) % size
    works = [dist.irecv(got, group=group, group_src=before, tag=3)]
    works.append(dist.isend(own, group=group, group_dst=after, tag=3))
    for work in works:
        work.wait()
    return [got]


def wanted(name, size, me, dtype, count, kind="SUM", root=0, salt=0):
    """The same by formula."""
    every = [values(r, dtype, count, salt) for r in range(size)]
    if name == "allreduce":
        return [reduced(kind, every)]
    if name == "reduce":
        return [reduced(kind, every)] if me == root else []
    if name == "reduce_scatter":
        return [reduced(kind, [values(r, dtype, count, salt + me) for r in range(size)])]
    if name == "reduce_scatter_single":
        parts = [values(r, dtype, count * size, salt)[me * count : (me + 1) * count] for r in range(size)]
        return [reduced(kind, parts)]
    if name == "broadcast":
        return [every[root]]
    if name == "allgather":
        return [values(r, dtype, count + r, salt) for r in range(size)]
    if name == "all_gather_single":
        return [torch.cat(every)]
    if name == "gather":
        return every if me == root else []
    if name == "scatter":
        return [values(root, dtype, count, salt + me)]
    if name in ("alltoall", "all_to_all_single"):
        slots = [values(r, dtype, count + r + me, salt + me) for r in range(size)]
        return slots if name == "alltoall" else [torch.cat(slots)]
    assert name == "ring", name
    return [every[(me - 1) % size]]


REDUCING = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_single")
MOVING = (
    "broadcast", "allgather", "all_gather_single", "gather", "scatter", "alltoall", "all_to_all_single", "ring",
)  # fmt: skip


def compare(name, group, *arguments, gloo=None, **named):
    """Ours against the formula, and against gloo where one is given that can do it."""
    size, me = dist.get_world_size(group), dist.get_rank(group)
    got = run(name, group, *arguments, **named)
    formula = wanted(name, size, me, *arguments, **named)
    assert len(got) == len(formula)
    for ours, theirs in zip(got, formula):
        assert np.array_equal(bits(ours), bits(theirs)), (name, arguments, named, ours, theirs)
    if gloo is not None:
        try:
            peer = run(name, gloo, *arguments, **named)
        except (RuntimeError, ValueError, TypeError):  # gloo refuses this dtype or operation, on every rank
            return 0
        for ours, theirs in zip(got, peer):
            if named.get("kind") == "AVG":  # gloo divides complex numbers its own way
                assert torch.allclose(ours, theirs, rtol=1e-6), ("gloo", name, arguments, named)
            else:
                assert np.array_equal(bits(ours), bits(theirs)), ("gloo", name, arguments, named)
        return 1
    return 0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@starts
def case_groups_of_both_kinds(rt):
    """The default group is ours; gloo's lives beside it."""
    port = rt.broadcast(free_port() if rt.rank == 0 else None)
    store = dist.TCPStore("127.0.0.1", port, rt.size, rt.rank == 0)
    dist.init_process_group("mpi4py", store=store, rank=rt.rank, world_size=rt.size)
    groups["ours"] = dist.group.WORLD
    groups["gloo"] = dist.new_group(backend="gloo")
    never_destroyed(groups["gloo"])


def case_reductions_equal_gloo_and_numpy(rt):
    """Every dtype, every operation, sizes 0, 1, odd, large; every root."""
    num_by_gloo = 0
    for dtype in REDUCIBLE:
        for kind in kinds_of(dtype):
            for name in REDUCING:
                for count in COUNTS if kind == "SUM" else (7,):
                    # gloo adds truths as bytes, and 16-bit floats in 16 bits
                    skip = count != 7 or dtype in (torch.bool, torch.float16, torch.bfloat16)
                    with_gloo = None if skip else groups["gloo"]
                    num_by_gloo += compare(
                        name, groups["ours"], dtype, count, kind=kind, root=count % rt.size, gloo=with_gloo
                    )
        for name in REDUCING:
            compare(name, groups["ours"], dtype, LARGE // rt.size)
    assert num_by_gloo > 50, num_by_gloo


def case_moves_equal_gloo_and_numpy(rt):
    """Every dtype that travels, lengths that differ between ranks, every root."""
    num_by_gloo = 0
    for dtype in MOVABLE:
        for name in MOVING:
            for count in COUNTS:
                with_gloo = groups["gloo"] if count == 7 else None
                num_by_gloo += compare(
                    name, groups["ours"], dtype, count, root=count % rt.size, gloo=with_gloo
                )
            compare(name, groups["ours"], dtype, LARGE // 4 // dtype.itemsize)
    assert num_by_gloo > 20, num_by_gloo


def case_premultiplied_sums_and_refusals(rt):
    """PREMUL_SUM by a number and a tensor; a clear TypeError for what makes no sense, before anything is sent."""
    total = sum(range(1, rt.size + 1))
    for factor in (0.5, torch.tensor(0.5)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensor = torch.full((5,), float(rt.rank + 1)).to(dtype)
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
            assert tensor.eq(total / 2).all(), (dtype, tensor)
            whole, out = torch.full((2 * rt.size,), float(rt.rank + 1)).to(dtype), torch.zeros(2, dtype=dtype)
            dist.reduce_scatter_tensor(out, whole, dist._make_nccl_premul_sum(factor))
            assert out.eq(total / 2).all() and whole.eq(rt.rank + 1).all(), "the input is the user's"
    for dtype, kind in (
        (torch.float32, "BAND"), (torch.uint32, "AVG"), (torch.float8_e5m2, "SUM"), (torch.bool, "AVG"),
    ):  # fmt: skip
        try:
            dist.all_reduce(torch.ones(3).to(dtype), getattr(dist.ReduceOp, kind))
        except TypeError as error:
            assert kind in str(error) and str(dtype) in str(error), error
        else:
            raise AssertionError(f"{kind} of {dtype} was accepted")


def case_strided_tensors(rt):
    """Inputs and outputs with holes; what lies in the holes is untouched."""
    size, me = rt.size, rt.rank

    def holes(rank, fill=None):
        base = torch.full((6, 8), -1.0)
        base[:, ::2] = values(rank, torch.float32, 24).view(6, 4) if fill is None else fill
        return base

    every = [holes(r)[:, ::2] for r in range(size)]
    base = holes(me)
    dist.all_reduce(base[:, ::2])
    assert torch.equal(base[:, ::2], sum(every)) and base[:, 1::2].eq(-1).all()
    base = holes(me)
    dist.broadcast(base[:, ::2].t(), 0)
    assert torch.equal(base[:, ::2], every[0]) and base[:, 1::2].eq(-1).all()
    slots = [holes(0, fill=0.0)[:, ::2] for _ in range(size)]
    dist.all_gather(slots, holes(me)[:, ::2])
    assert all(torch.equal(slot, wanted) for slot, wanted in zip(slots, every))
    out = torch.zeros(24 * size, 2)[:, 0]
    dist.all_gather_into_tensor(out, holes(me)[:, ::2])
    assert torch.equal(out, torch.cat([each.reshape(-1) for each in every]))
    out = torch.zeros(4, 3).t()
    dist.reduce_scatter(out, [torch.full((4, 3), float(me + r)).t() for r in range(size)])
    assert out.eq(sum(r + me for r in range(size))).all()
    wide = torch.zeros(size, 4)[:, ::2]
    dist.all_to_all_single(wide, torch.arange(size * 2.0).view(2, size).t() + 100 * me)
    assert torch.equal(wide, torch.tensor([[me + 100.0 * r, me + size + 100.0 * r] for r in range(size)]))
    got = torch.zeros(5, 2)[:, 1]
    works = [
        dist.irecv(got, (me - 1) % size),
        dist.isend(torch.full((5, 2), float(me))[:, 0], (me + 1) % size),
    ]
    for work in works:
        work.wait()
    assert got.eq((me - 1) % size).all()


def case_subgroups(rt):
    """Every collective on the first and last rank, in reverse order too, while others do something else."""
    size = rt.size
    pairs = [[0, size - 1], [0, 1]] if size > 2 else [[0, 1]]
    for ranks in pairs:
        group = dist.new_group(ranks)
        if rt.rank in ranks:
            for name in (*REDUCING, *MOVING):
                for count in (1, 5003):
                    compare(name, group, torch.float32, count, root=1)
            dist.destroy_process_group(group)
    dist.barrier()


def case_payloads_with_checksums(rt):
    """Every collective gives what it gives without, and a bit that flips on the way is seen by its receiver alone."""
    rt.payloads, rt.allreduce_plan.in_messages = PayloadChecks(checks=True), True
    group = dist.new_group()
    checks, rt.payloads, rt.allreduce_plan.in_messages = rt.payloads, None, False
    for name in (
        "allreduce",
        "reduce_scatter_single",
        "all_gather_single",
        "allgather",
        "broadcast",
        "alltoall",
    ):
        before = checks.num_checked
        for dtype in (torch.float32, torch.bfloat16):
            compare(name, group, dtype, 5003)
        assert checks.damaged() == [] and (checks.num_checked > before or rt.rank == 0)
    for receiver in range(rt.size):
        if rt.rank == receiver:
            checks.flip(0, 1234567)
        rt.step = 4
        dist.all_reduce(torch.ones(5003), group=group)
        found = checks.damaged()
        assert [step for _, step in found] == [4] * (rt.rank == receiver), found
        assert all(sender != rt.rank and (rt.size > 2 or sender == 1 - rt.rank) for sender, _ in found), found
    for tensor in (torch.arange(37.0), torch.arange(38.0)[1:], torch.ones(3, dtype=torch.bfloat16)[1:]):
        whole = checksum_of(tensor)
        assert torch.equal(whole, checksum_of(tensor.clone()))
        for bit in range(8 * tensor.nbytes):
            other = tensor.clone()
            other.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            assert not torch.equal(whole, checksum_of(other))
    dist.destroy_process_group(group)
    dist.barrier()


def case_many_at_once_on_several_groups(rt):
    """Forty asynchronous operations on two groups, submitted in another order on every rank (the order within a group
    is the same), waited for in yet another: nothing blocks for ever, everything is right."""
    second = dist.new_group(list(range(rt.size)))
    for large in (3, 200_000):
        queues, checks = {}, []
        for index, group in enumerate((groups["ours"], second)):
            queues[index] = [(group, k, torch.full((large,), float(rt.rank + k + index))) for k in range(20)]
        order = [0] * 20 + [1] * 20
        random.Random(rt.rank).shuffle(order)
        works = []
        for index in order:
            group, k, tensor = queues[index].pop(0)
            if k % 3 == 0:
                works.append(dist.all_reduce(tensor, group=group, async_op=True))
                checks.append((tensor, sum(r + k + index for r in range(rt.size))))
            elif k % 3 == 1:
                works.append(dist.broadcast(tensor, 1, group=group, async_op=True))
                checks.append((tensor, 1 + k + index))
            else:
                out = torch.zeros(large * rt.size)
                works.append(dist.all_gather_into_tensor(out, tensor, group=group, async_op=True))
                checks.append((out[-large:], rt.size - 1 + k + index))
        random.Random(rt.rank + 100).shuffle(works)
        for work in works:
            work.wait()
        assert all(tensor.eq(value).all() for tensor, value in checks)
    dist.destroy_process_group(second)


def case_work_tells_what_became_of_it(rt):
    """wait, is_completed, is_success, exception, result, future, source of a receive from anybody."""
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is tensor and work.get_future().value()[0].eq(rt.size).all()
    if rt.rank == 0:
        seen = {}
        for _ in range(rt.size - 1):
            got = torch.zeros(3000, dtype=torch.int64)
            source = dist.recv(got, tag=9)
            seen[source] = got
        assert all(got.eq(source).all() for source, got in seen.items()) and len(seen) == rt.size - 1
    else:
        dist.send(torch.full((3000,), rt.rank), 0, tag=9)
    groups["ours"].monitored_barrier()
    gathered = [None] * rt.size
    dist.all_gather_object(gathered, {"rank": rt.rank})
    assert [each["rank"] for each in gathered] == list(range(rt.size))
    objects = [rt.rank, "x" * rt.rank]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [1, "x"]


def case_coalesced(rt):
    """Several tensors in one Work: torch's coalescing manager, and the compiler's functional collectives."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.distributed_c10d import _coalescing_manager

    tensors = [torch.full((k + 1,), float(rt.rank)) for k in range(3)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(tensor.eq(sum(range(rt.size))).all() for tensor in tensors)
    outs = [torch.zeros(rt.size * (k + 1)) for k in range(3)]
    with _coalescing_manager(async_ops=True) as manager:
        for k, out in enumerate(outs):
            dist.all_gather_into_tensor(out, torch.full((k + 1,), float(rt.rank)))
    manager.wait()
    assert all(out.view(rt.size, -1)[:, 0].tolist() == list(range(rt.size)) for out in outs)
    outs = [torch.zeros(k + 1) for k in range(3)]
    with _coalescing_manager():
        for k, out in enumerate(outs):
            dist.reduce_scatter_tensor(out, torch.full((rt.size * (k + 1),), float(rt.rank)))
    assert all(out.eq(sum(range(rt.size))).all() for out in outs)
    everybody = list(range(rt.size))
    assert functional.all_reduce(torch.ones(3), "sum", everybody).eq(rt.size).all()
    assert functional.all_gather_tensor(torch.ones(2), 0, everybody).sum() == 2 * rt.size
    assert functional.reduce_scatter_tensor(torch.ones(2 * rt.size), "sum", 0, everybody).eq(rt.size).all()
    assert functional.all_to_all_single(torch.ones(rt.size), None, None, everybody).eq(1).all()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, outs[2], (rt.rank - 1) % rt.size),
            dist.P2POp(dist.isend, torch.full((3,), float(rt.rank)), (rt.rank + 1) % rt.size),
        ]
    )
    for work in works:
        work.wait()
    assert outs[2].eq((rt.rank - 1) % rt.size).all()


def case_float32_on_a_sixteen_bit_wire(rt):
    """Every contribution is rounded once, added in float32 in rank order, and the sum is rounded once."""
    for wire in (torch.bfloat16, torch.float16):
        for count in (0, 1, 5003, 100_003):
            every = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(rt.size)]
            total = torch.zeros(count)
            for k, other in enumerate(every):
                total = other.to(wire).float() if k == 0 else total + other.to(wire).float()
            tensor = every[rt.rank].clone()
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.AVG
            groups["ours"].allreduce_on_wire(tensor, wire, options).wait()
            expected = (total / rt.size).to(wire).float()
            if len(set(rt.nodes)) == 1:
                assert torch.equal(tensor, expected), (wire, count)
            else:  # the sum of a node is rounded too
                assert torch.allclose(tensor, expected, rtol=4 * torch.finfo(wire).eps, atol=1e-2)


def case_differences_between_ranks_are_errors_on_all(rt):
    """Shape, dtype, operation, root, collective, splits: MismatchError on every rank, and the group works on."""
    odd = rt.rank == rt.size - 1
    everywhere = {
        "shape": lambda: dist.all_reduce(torch.ones(4 if odd else 300_000)),
        "dtype": lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32)),
        "operation": lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "root": lambda: dist.broadcast(torch.ones(4), int(odd)),
        "collective": lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(4)),
        "splits": lambda: dist.all_to_all(
            [torch.zeros(2) for _ in range(rt.size)],
            [torch.zeros(100_000 if odd and r == 0 else 2) for r in range(rt.size)],
        ),
    }
    for name, call in everywhere.items():
        try:
            call()
        except MismatchError as error:
            assert "ranks of this group call" in str(error), error
        else:
            raise AssertionError(f"{name}: not noticed on rank {rt.rank}")
    for count in (2, 5_000_000):  # a receive that is too short, small and beyond what the library survives
        if rt.rank == 0:
            dist.send(torch.ones(count + 1), 1)
        if rt.rank == 1:
            try:
                dist.recv(torch.zeros(2), 0)
            except MismatchError as error:
                assert f"rank 0 sent {count + 1} elements of torch.float32" in str(error), error
            else:
                raise AssertionError("not noticed")
    dist.barrier()


def case_the_choice_is_the_same_everywhere(rt):
    """What was measured and decided is one thing on all ranks."""
    told = groups["ours"].transport()
    assert rt.allgather(told) == [told] * rt.size
    assert told["setting"] == os.environ.get(VARIABLE, "auto")


if __name__ == "__main__":
    sizes = [int(text) for text in os.environ.get("MPITRAIN_TEST_NODES", "").split(",") if text]
    if sizes:  # the runtime asks for the node's name when it starts
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
        os.environ["SLURMD_NODENAME"] = f"node{sum(rank >= end for end in accumulate(sizes))}"
    run_cases(globals())
