"""torch.distributed over MPI: every operation against numpy, DDP against serial training, errors, overlap."""

import contextlib
import functools
import gc
import itertools
import os
import threading
import time
import warnings
import weakref
from datetime import timedelta
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpitrain  # noqa: F401  (this import is all a script needs)
from mpitrain.errors import MismatchError
from mpitrain.mpi.engine import doorbell
from mpitrain.mpi.engine.collective_queue import PeerFailedError
from mpitrain.mpi.memory import buffers
from mpitrain.mpi.process_group import base, on_board, point_to_point, process_group
from tests.mpi.cases import raises, run_cases, starts

DEADLINE_S = 30.0
warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames all_gather_into_tensor
NUMPY = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def values(rank, dtype, count):
    """Small integers, different on every rank, exact in every dtype."""
    drawn = np.random.default_rng([rank, count]).integers(0, 4, count)
    return torch.from_numpy(drawn).to(dtype)


@starts
def case_one_word_starts_the_group(rt):
    """`init_process_group("mpi4py")` and nothing else: rank and size come from MPI, no port is opened."""
    dist.init_process_group("mpi4py")
    assert (dist.get_rank(), dist.get_world_size()) == (rt.rank, rt.size)
    assert dist.get_backend() == "mpi4py" and type(dist.group.WORLD) is process_group.MpiProcessGroup
    assert not rt.engine.owns_mpi


def case_allreduce_equals_numpy(rt):
    """Every operation on every dtype that may do it; odd lengths, zero elements, no dimension."""
    for dtype in (
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
    ):
        names = ["SUM", "PRODUCT", "MIN", "MAX"] + (
            ["AVG"] if dtype.is_floating_point else ["BAND", "BOR", "BXOR"]
        )
        for name in names:
            for count in (0, 1, 37, 5000):
                tensor = values(rt.rank, dtype, count)
                everybody = [values(rank, dtype, count).numpy() for rank in range(rt.size)]
                wanted = everybody[0]
                for other in everybody[1:]:
                    wanted = NUMPY[name](wanted, other)
                if name == "AVG":
                    wanted = wanted / everybody[0].dtype.type(rt.size)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
                assert np.array_equal(tensor.numpy(), wanted), (dtype, name, count)
    scalar = torch.tensor(float(rt.rank))
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(rt.size))


def case_what_is_waited_for_begins_in_the_callers_thread(rt):
    """Where nothing else is under way. A rank that is late finds the others' arrivals with the polls."""
    engine, queued = rt.engine, itertools.count()
    submit = engine._submit

    def count(*arguments, **named):
        next(queued)
        return submit(*arguments, **named)

    engine._submit = count
    try:
        for turn in range(60):
            if turn % 20 == rt.rank:
                time.sleep(0.01)  # longer than the others wait in the call itself
            tensor = torch.full((3,), float(rt.rank + turn))
            dist.all_reduce(tensor)
            assert tensor.tolist() == [sum(range(rt.size)) + turn * rt.size] * 3
    finally:
        del engine._submit
    assert next(queued) < 60


def case_allreduce_of_truths_and_complex(rt):
    """bool: sum and max are `or`, product and min are `and`; complex numbers add."""
    for name, wanted in (
        ("SUM", [True, True, False]),
        ("MAX", [True, True, False]),
        ("MIN", [True, False, False]),
    ):
        flags = torch.tensor([True, rt.rank == 1, False])
        dist.all_reduce(flags, getattr(dist.ReduceOp, name))
        assert flags.tolist() == wanted, name
    number = torch.tensor([complex(rt.rank, 1)])
    dist.all_reduce(number)
    assert number.item() == complex(sum(range(rt.size)), rt.size)


def case_sixteen_bit_sums_are_float32_sums_rounded_once(rt):
    """bfloat16 and float16: equal on all ranks to the sum in float32, in rank order, rounded once."""
    for dtype in (torch.bfloat16, torch.float16):
        for count in (0, 1, 10, 4097):
            every = [
                torch.randn(count, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in range(rt.size)
            ]
            for name in ("SUM", "AVG", "MIN", "MAX"):
                total = every[0].float()
                for other in every[1:]:
                    if name in ("SUM", "AVG"):
                        total = total + other.float()
                    else:
                        total = (torch.minimum if name == "MIN" else torch.maximum)(total, other.float())
                wanted = (total / rt.size if name == "AVG" else total).to(dtype)
                tensor = every[rt.rank].clone()
                dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
                assert torch.equal(tensor, wanted), (dtype, name, count)
    # where every addition is rounded, the ones are lost one by one: 256 is followed by 258
    summed = torch.full((3,), 256.0 if rt.rank == 0 else 1.0).to(torch.bfloat16)
    dist.all_reduce(summed)
    wanted = torch.tensor(256.0 + rt.size - 1).to(torch.bfloat16)
    assert summed.eq(wanted).all() and (rt.size == 2 or wanted > 256), summed


def case_senseless_reductions_are_refused(rt):
    """A clear TypeError before anything is sent, so the group is usable afterwards."""
    raises(TypeError, "BAND", lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND))
    raises(TypeError, "AVG", lambda: dist.all_reduce(torch.ones(1, dtype=torch.bool), dist.ReduceOp.AVG))
    raises(TypeError, "BAND", lambda: dist.all_reduce(torch.ones(1).bfloat16(), dist.ReduceOp.BAND))
    dist.barrier()


def case_strided_and_coalesced(rt):
    """A strided tensor is reduced in place, its neighbours untouched; several tensors in one Work."""
    base = torch.zeros(4, 6)
    base[:, ::2] = rt.rank + 1.0
    dist.all_reduce(base[:, ::2])
    total = rt.size * (rt.size + 1) / 2
    assert base[:, ::2].eq(total).all() and base[:, 1::2].eq(0).all()
    several = [torch.full((k,), float(rt.rank + k)) for k in range(3)]
    dist.all_reduce_coalesced(several)
    assert all(tensor.eq(sum(r + k for r in range(rt.size))).all() for k, tensor in enumerate(several))


def case_allreduce_in_pieces(rt):
    """More elements than MPI can count (the limit is lowered here), 32 and 16 bit."""
    before = buffers.MAX_COUNT
    buffers.MAX_COUNT = 1000
    try:
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.arange(4100).remainder(7).to(dtype) + rt.rank
            dist.all_reduce(tensor)
            wanted = torch.arange(4100).remainder(7) * rt.size + sum(range(rt.size))
            assert torch.equal(tensor.long(), wanted), dtype
        out = torch.zeros(rt.size * 700)
        dist.all_gather_into_tensor(out, torch.full((700,), float(rt.rank)))
        assert torch.equal(out, torch.arange(rt.size).repeat_interleave(700).float())
    finally:
        buffers.MAX_COUNT = before


def case_broadcast_and_gathers(rt):
    """From every root; lists with sizes that differ; one tensor; a slot of the output as the input; objects."""
    for root in range(rt.size):
        tensor = torch.arange(11).to(torch.bfloat16) * (rt.rank == root) + root * (rt.rank == root)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor.float(), torch.arange(11.0) + root)
    outputs = [torch.zeros(rank, dtype=torch.int64) for rank in range(rt.size)]
    dist.all_gather(outputs, torch.full((rt.rank,), rt.rank))
    assert [o.tolist() for o in outputs] == [[rank] * rank for rank in range(rt.size)]
    out = torch.zeros(rt.size, 5)
    out[rt.rank] = rt.rank
    dist.all_gather_into_tensor(out, out[rt.rank])
    assert torch.equal(out, torch.arange(float(rt.size))[:, None].expand(-1, 5))
    objects = [None] * rt.size
    dist.all_gather_object(objects, {"rank": rt.rank, "pad": "p" * rt.rank})
    assert [o["rank"] for o in objects] == list(range(rt.size))
    raises(ValueError, "wants", lambda: dist.all_gather_into_tensor(torch.zeros(1), torch.zeros(3)))


def case_send_and_receive(rt):
    """Around the ring, receives posted before sends on every rank (as pipelines do), large and small."""
    after, before = (rt.rank + 1) % rt.size, (rt.rank - 1) % rt.size
    for count in (0, 3, 500_000):
        got = torch.full((count,), -1.0)
        works = [
            dist.irecv(got, before, tag=count),
            dist.isend(torch.full((count,), float(rt.rank)), after, tag=count),
        ]
        for work in works:
            work.wait()
        assert got.eq(before).all()


def case_messages_of_every_type_and_length(rt):
    """Messages that are all head, and a little longer; the receiver's memory dense, with holes, and of inference mode:
    what one rank takes for short another may not."""
    after, before = (rt.rank + 1) % rt.size, (rt.rank - 1) % rt.size
    types = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
    lengths = (1, 64, point_to_point._INLINE_BYTES, point_to_point._INLINE_BYTES + 8)
    for dtype, num_bytes in itertools.product(types, lengths):
        count = max(1, num_bytes // dtype.itemsize)
        own, wanted = (values(rank, torch.uint8, count).to(dtype) for rank in (rt.rank, before))
        holes = torch.zeros(count, 2, dtype=dtype)
        with torch.inference_mode():
            unwritable = torch.zeros(count, dtype=dtype)
        for got in (torch.zeros(count, dtype=dtype), holes[:, 0], unwritable):
            received, sent = dist.irecv(got, before), dist.isend(own, after)
            received.wait()
            sent.wait()
            assert torch.equal(got, wanted), (dtype, count)
        assert not holes[:, 1].any()
    sent = torch.full((3,), float(rt.rank))
    work = dist.isend(sent, after)
    work.wait()
    sent.fill_(-1)  # it is the caller's again
    got = torch.zeros(3, requires_grad=True)
    assert dist.recv(got) == before and got.eq(before).all()
    dist.barrier()


def case_a_message_that_does_not_fit(rt):
    """Of another type, shorter or longer than what is to be received, on both sides of what is short: it is received
    aside, and what follows arrives."""
    edge = point_to_point._INLINE_BYTES // 4
    for sent, wanted in itertools.product((torch.ones(3), torch.ones(edge + 1)), (edge, edge + 2, 4)):
        if rt.rank == 0:
            dist.send(sent, 1)
            dist.send(torch.full((2,), 7.0), 1)
        elif rt.rank == 1:
            got = torch.full((wanted,), -1.0)
            raises(
                MismatchError,
                f"rank 0 sent {sent.numel()} elements of torch.float32",
                functools.partial(dist.recv, got, 0),
            )
            assert got.eq(-1).all()
            dist.recv(got[:2], 0)
            assert got[:2].tolist() == [7, 7]
    if rt.rank == 0:
        dist.send(torch.ones(3), 1)
    elif rt.rank == 1:
        raises(MismatchError, "of torch.float32", lambda: dist.recv(torch.ones(3, dtype=torch.int32), 0))
    dist.barrier()


def case_a_sender_goes_on_before_anybody_has_asked_for_its_message(rt):
    """It may write its tensor again; not so with one message too many, nor with one that is too long for a copy."""
    count, most = point_to_point._COPIED_BYTES // 4, base.MOST_COPIES
    lengths = [count + 1, *[count] * (most + 1)]
    if rt.rank == 0:
        longer, tensor, last = torch.zeros(count + 1), torch.zeros(count), torch.full((count,), most + 1.0)
        works = [dist.isend(longer, 1)]
        for turn in range(1, most + 1):
            assert dist.isend(tensor.fill_(turn), 1).is_completed(), turn
        works.append(dist.isend(last, 1))
        # Intel MPI takes in half a megabyte that nobody has asked for
        assert "Intel" in rt.library or not any(work.is_completed() for work in works)
    dist.barrier()
    if rt.rank == 0:
        for work in works:
            work.wait()
    elif rt.rank == 1:
        for turn, length in enumerate(lengths):
            got = torch.zeros(length)
            dist.recv(got, 0)
            assert got.eq(turn).all(), turn
    dist.barrier()


def case_short_messages_that_nobody_waits_for_arrive(rt):
    """The communication thread ends its nap for them, and they end in time where they never come."""
    after, before = (rt.rank + 1) % rt.size, (rt.rank - 1) % rt.size
    for _ in range(20):
        got = torch.zeros(2)
        work = dist.irecv(got, before)
        hand_on = work.get_future().then(lambda future: future.value()[0].sum().item())
        dist.isend(torch.full((2,), float(rt.rank)), after)
        deadline_s = time.monotonic() + DEADLINE_S
        while not work.is_completed():
            assert time.monotonic() < deadline_s, "nobody drives what this rank does not wait for"
        assert hand_on.wait() == 2 * before
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    never = dist.irecv(torch.zeros(1), group=group, group_src=before)
    while not never.is_completed():
        assert time.monotonic() < deadline_s
    raises(TimeoutError, "timed out", never.wait)


def case_asynchronous_works_complete_in_any_order_of_waiting(rt):
    """Twenty allreduces in flight, waited for backwards; futures carry the tensors."""
    tensors = [torch.full((1000,), float(k + rt.rank)) for k in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for k, work in reversed(list(enumerate(works))):
        work.wait()
        assert tensors[k].eq(k * rt.size + sum(range(rt.size))).all()
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    assert future.wait()[0].tolist() == [rt.size] * 2


def case_tensors_of_a_work_that_is_done_are_let_go_at_once(rt):
    """Not when the garbage collector comes, which knows nothing of their size."""
    gc.collect()
    gc.disable()
    try:
        for whether in (False, True):
            mine, all_of_them = torch.ones(100), torch.ones(100 * rt.size)
            known = [weakref.ref(mine), weakref.ref(all_of_them)]
            for work in (
                dist.all_gather_into_tensor(all_of_them, mine, async_op=whether),
                dist.reduce_scatter_tensor(mine, all_of_them, async_op=whether),
                dist.all_reduce(mine, async_op=whether),
                dist.broadcast(mine, 0, async_op=whether),
            ):
                if work is not None:
                    work.wait()
            del mine, all_of_them, work
            deadline_s = time.monotonic() + DEADLINE_S
            while any(reference() is not None for reference in known):
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
    finally:
        gc.enable()


def case_groups_of_some_ranks(rt):
    """Two groups that share rank 0, and one without it; only members take part."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, rt.size - 1])
    for group, members in ((first, [0, 1]), (second, [0, rt.size - 1])):
        if rt.rank in members:
            tensor = torch.tensor([float(rt.rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)
            dist.broadcast(tensor, members[1], group=group)
            assert dist.get_process_group_ranks(group) == members


class Dyadic(nn.Module):
    """Three linear maps of the input, added: each step adds five binary digits to the parameters, so that six steps are
    exact in float64, and then every order of adding gives the same bits."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(6, 2, bias=k != 1, dtype=torch.float64) for k in range(3)])
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=generator))

    def forward(self, x):
        return torch.relu(self.maps[0](x)) + self.maps[1](x) + self.maps[2](x)


def train(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    for inputs, wanted in zip(x, y):
        optimizer.zero_grad()
        (model(inputs) - wanted).square().mean().backward()
        optimizer.step()


def case_ddp_equals_serial_training_bit_for_bit(rt):
    """Split batches over 2 or 4 ranks against the full batch on one, over 6 steps, whatever the bucket size.

    DDP divides by the number of ranks before it adds, so the theorem is about powers of two.
    """
    if rt.size not in (2, 4):
        return
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-2, 3, (6, 8, 6), generator=generator).double()
    y = torch.randint(-2, 3, (6, 8, 2), generator=generator).double()
    serial = Dyadic()
    train(serial, x, y)
    for bucket_cap_mb in (25, 1e-5):
        model = Dyadic()
        if rt.rank:
            with torch.no_grad():
                model.maps[0].weight.fill_(7)  # rank 0's parameters must win
        part = slice(rt.rank * 8 // rt.size, (rt.rank + 1) * 8 // rt.size)
        train(DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb), x[:, part], y[:, part])
        for (name, ours), theirs, start in zip(
            model.named_parameters(), serial.parameters(), Dyadic().parameters()
        ):
            assert torch.equal(ours, theirs), (name, bucket_cap_mb)
            assert not torch.equal(ours, start), name


class Hold(torch.autograd.Function):
    """The identity; its backward waits until the event has happened."""

    @staticmethod
    def forward(ctx, x, event):
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.event.wait(DEADLINE_S), (
            "backward had to end before a collective was carried out: no overlap"
        )
        return gradient, None


def case_collectives_run_while_backward_computes(rt):
    """Backward cannot end before the first bucket has been reduced: it waits for that in its last layer."""
    arrived = threading.Event()
    model = nn.Sequential(nn.Linear(4, 4), *[nn.Linear(4, 4) for _ in range(4)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)

    def reduce(state, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def carried(done):
            arrived.set()
            return done.value()[0]

        return future.then(carried)

    ddp.register_comm_hook(None, reduce)

    def front(x):
        hidden = Hold.apply(model[0](x), arrived)
        for layer in list(model)[1:]:
            hidden = layer(hidden)
        return hidden

    model.forward = front
    arrived.set()
    ddp(torch.ones(2, 4)).sum().backward()  # the first step has one bucket; DDP splits it after that
    arrived.clear()
    ddp(torch.ones(2, 4)).sum().backward()
    assert arrived.is_set()


class Broken:
    """A communicator on which Allreduce fails."""

    def __init__(self, comm):
        self._comm, self.size = comm, comm.size

    def Allreduce(self, *args):
        raise ConnectionError("planted in Allreduce")

    def __getattr__(self, name):
        return getattr(self._comm, name)


def case_errors_reach_the_waiting_user(rt):
    """An error inside a collective is raised by wait, by the future, and out of backward; then all goes on."""
    group = dist.group.WORLD
    model = nn.Linear(3, 3)
    ddp = DistributedDataParallel(model)
    whole, group._comm = group._comm, Broken(group._comm)
    on_boards = mock.patch.object(on_board.TensorBoard, "add_up", side_effect=ConnectionError("planted"))
    try:
        on_boards.start()
        raises(ConnectionError, "planted", lambda: dist.all_reduce(torch.ones(3)))
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        raises(Exception, "planted", future.wait)
        raises(Exception, "planted", lambda: ddp(torch.ones(1, 3)).sum().backward())
    finally:
        group._comm = whole
        on_boards.stop()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [rt.size] * 3


class OnDevice:
    """A stand-in GPU that owns what it is told to; copies are checked to cross the border."""

    def __init__(self, *tensors):
        self._device = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def owns(self, tensor):
        return tensor.untyped_storage().data_ptr() in self._device

    def pinned(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_event(self, tensor):
        return True

    def wait_for(self, event):
        assert event

    def copy(self, target, source):
        assert self.owns(target) != self.owns(source)
        target.copy_(source)


def case_device_tensors_are_staged(rt):
    """allreduce, its 16-bit path, broadcast, gather, send and receive of tensors that MPI may not touch."""
    tensors = [torch.full((50,), float(rt.rank + 1)) for _ in range(3)]
    half, out = torch.full((50,), float(rt.rank + 1)).to(torch.bfloat16), torch.zeros(rt.size, 50)
    before = buffers._accelerator
    buffers.use_accelerator(OnDevice(*tensors, half, out))
    try:
        total = rt.size * (rt.size + 1) / 2
        dist.all_gather_into_tensor(out, tensors[0])
        assert torch.equal(out[:, 0], torch.arange(1.0, rt.size + 1))
        dist.all_reduce(tensors[0])
        dist.all_reduce(half)
        assert tensors[0].eq(total).all() and half.eq(total).all()
        dist.broadcast(tensors[1], 1)
        assert tensors[1].eq(2).all()
        works = [dist.irecv(tensors[2], (rt.rank - 1) % rt.size)]
        works.append(dist.isend(torch.full((50,), float(rt.rank)), (rt.rank + 1) % rt.size))
        for work in works:
            work.wait()
        assert tensors[2].eq((rt.rank - 1) % rt.size).all()
    finally:
        buffers.use_accelerator(before)


def case_small_collectives_of_ranks_that_come_late(rt):
    """Some are done at once and some wait for ranks that come late, in every order; a call that others do not make is
    refused, and the next one is as if it had not been."""
    busy = torch.ones(200, 200)
    for turn in range(60):
        for _ in range(((turn + rt.rank) % 4) * 5):
            busy @ busy
        for count in (3, 4, 3):
            tensor = torch.full((count,), float(turn + rt.rank))
            dist.all_reduce(tensor)
            assert tensor.eq(turn * rt.size + sum(range(rt.size))).all(), (turn, tensor)
        if turn % 20 == 0:
            wrong = torch.ones(3 if rt.rank else 4)
            raises(ValueError, "different collectives", functools.partial(dist.all_reduce, wrong))
        with torch.inference_mode(turn % 2 == 0):
            tensor = torch.ones(3, requires_grad=True).detach()
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            assert tensor.eq(1).all()


def case_ranks_that_wait_sleep_until_the_last_one_rings(rt):
    """Rank 0 comes when it sees all others wait: one ring each ends their sleep. What the ranks leave is added up to
    the bits that the library makes of it."""
    group = dist.group.WORLD
    if doorbell.why_not("none"):
        assert group._board is None
        return
    bell, peers = rt.neighbours.bell, rt.neighbours.words()
    assert len(peers) == rt.size - 1
    missed, rung, steps = bell.num_missed, bell.num_rung, group._board.board._steps
    for turn in range(20):
        tensor = torch.full(
            (3,), float(turn), dtype=torch.bfloat16
        )  # left on the board by any number of ranks
        if rt.rank == 0:
            while min(steps[1:]) == steps[0] or not all(peer.words[48] for peer in peers):
                pass
        work = dist.all_reduce(tensor, async_op=True)
        if turn % 2:
            work.get_future().wait()
        work.wait()
        assert tensor.eq(turn * rt.size).all()
        dist.barrier()
    assert rt.rank or bell.num_rung - rung >= 20 * (rt.size - 1), (bell.num_rung - rung, rt.size)
    assert bell.num_missed - missed <= 2  # of 20: a rank may lose its core between its arrival and its ring


def case_a_message_rings_its_receiver_and_its_arrival_the_sender(rt):
    """A receiver that sleeps is woken by a short message, and the sender of a long one by its arrival, of which it
    learns then only; from a rank that is named, and from any."""
    pair = dist.new_group([0, 1])
    if doorbell.why_not("none") or rt.rank > 1:
        return
    bell, (other,) = rt.neighbours.bell, rt.neighbours.among([1 - rt.rank]).words()
    rings, ring = [], doorbell.NodePeers.ring

    def counted(peers, rank):
        rings.append(rank)
        ring(peers, rank)

    with mock.patch.object(doorbell.NodePeers, "ring", counted):
        for count in (5, 300_000):
            num_rung = 0
            for turn in range(40):
                tensor, rung = torch.full((count,), float(turn + rt.rank)), bell.num_rung
                rings.clear()
                if rt.rank == 0:
                    while count == 5 and other.words[48] != doorbell.DRIVER:  # it sleeps
                        pass
                    dist.send(tensor, 1)
                    num_rung += bell.num_rung > rung
                elif turn % 2:
                    assert dist.recv(tensor) == 0
                else:
                    dist.recv(tensor, 0)
                assert tensor.eq(turn).all()
                while rt.rank == 0 and 1 not in rings:  # a copy is posted late
                    os.sched_yield()
                assert rt.rank == 0 or rings.count(0) == (count > 5)
                dist.barrier(group=pair)
            # whoever waits looks now and then, and may see a message before it is rung
            assert rt.rank or count > 5 or num_rung > 20, num_rung


def case_no_rank_of_a_node_rings_where_one_of_them_cannot(rt):
    """It has no bell, or cannot open those of the others."""
    if doorbell.why_not("none"):
        return

    def meet(change):
        bell = doorbell.own()
        places = rt.allgather(bell.memory.place)
        rt._meet_neighbours(bell, [change(places[0]), *places[1:]])
        raises(OSError, "Bad file descriptor", lambda: os.fstat(places[rt.rank][1]))

    with mock.patch.object(rt, "neighbours", None), mock.patch.object(rt.engine, "use_bell") as used:
        meet(lambda place: None)
        assert rt.neighbours is None
        meet(lambda place: [*place[:2], "another"] if rt.rank == 1 else place)
        assert rt.neighbours is None and not used.called
        meet(lambda place: place)
        assert rt.neighbours is not None and used.called


def case_where_mpi_is_to_read_device_memory_nothing_is_left_on_the_board(rt):
    """Also where one rank's environment alone says so."""
    with mock.patch.dict(os.environ, {"MPITRAIN_GPU_BUFFERS": "off" if rt.rank else "on"}):
        group = dist.new_group()
    with mock.patch.object(on_board.Board, "copy_in", side_effect=AssertionError("left on the board")):
        tensor = torch.ones(5).bfloat16()
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, 1, group=group)
        assert tensor.eq(rt.size).all()
        if not doorbell.why_not("none"):  # the board is there, and others' tensors are left there
            raises(Exception, "", functools.partial(dist.all_reduce, tensor))
    dist.destroy_process_group(group)


def case_a_part_that_cannot_be_left_fails_its_own_collective_alone(rt):
    """On the rank that could not leave it with its own error, on the others with one that names the rank; whichever
    thread leaves it. The collectives before and behind it are as if it had not been."""
    if doorbell.why_not("none"):
        return
    copy_in = on_board.Board.copy_in

    def planted(board, address, size_bytes):
        if size_bytes == 2 * 77 and rt.rank == 1:
            raise MemoryError("planted")
        copy_in(board, address, size_bytes)

    error, text = (
        (MemoryError, "planted") if rt.rank == 1 else (PeerFailedError, "rank 1 of this group failed")
    )
    with mock.patch.object(on_board.Board, "copy_in", planted):
        for turn in range(30):
            whole, bad = torch.full((5,), 2.0).bfloat16(), torch.ones(77).bfloat16()
            if turn % 3 == 0:
                raises(error, text, lambda: dist.all_reduce(bad))  # noqa: B023 - it is called at once
            else:
                tensors = (whole, bad, whole.clone(), bad.clone())
                works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
                if turn % 3 == 1:  # the thread that waits here drives nothing
                    raises(Exception, text, works[-1].get_future().wait)
                for work in works[1::2]:
                    raises(error, text, work.wait)
                for work in works[::2]:
                    work.wait()
                assert tensors[2].eq(2 * rt.size).all()
            dist.all_reduce(tensor := torch.full((3,), float(turn)).bfloat16())
            assert tensor.eq(turn * rt.size).all()


def case_what_lies_on_the_board_has_the_bits_of_the_library(rt):
    """Also NaN, infinities, and two zeros of either sign; tensors of any layout, and a root's."""
    with mock.patch.object(on_board, "make", return_value=None):
        plain = dist.new_group()
    assert plain._board is None
    failing = mock.patch.object(on_board.Board, "__init__", side_effect=OSError("planted"))
    with failing if rt.rank == 1 else contextlib.nullcontext():
        unlike = dist.new_group()
    assert unlike._board is None  # for all, where one has none
    dist.destroy_process_group(unlike)
    draw = torch.Generator().manual_seed(rt.rank)
    scales = 2.0 ** torch.randint(-12, 13, (33,), generator=draw)  # so that another order of adding shows
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.int32,
        torch.uint16,
        torch.bool,
    ):
        for kind in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            own = (torch.randn(33, generator=draw) * scales).to(dtype)
            if dtype.is_floating_point:
                own[:4] = torch.tensor(
                    [-0.0, 0.0 if rt.rank else -0.0, float("inf"), float("nan") if rt.rank else 1.0]
                )
                own[4] = (2.0**30, -(2.0**30), 1.0, 1.0)[rt.rank % 4]
            ours, theirs = own.clone(), own.clone()
            op = getattr(dist.ReduceOp, kind)
            try:
                dist.all_reduce(theirs, op=op, group=plain)
            except (TypeError, ValueError):
                continue
            dist.all_reduce(ours, op=op)
            numbers = ~theirs.isnan()  # of these the bits; whose NaN it is decides those of a NaN
            assert ours.isnan().eq(~numbers).all(), (dtype, kind)
            if not numbers.all():  # torch 2.8 has no such index for uint16
                ours, theirs = ours[numbers], theirs[numbers]
            assert ours.view(torch.uint8).equal(theirs.view(torch.uint8)), (dtype, kind, ours, theirs)
    strided = torch.full((4, 6), float(rt.rank))[:, ::2]
    dist.all_reduce(strided)
    assert strided.eq(sum(range(rt.size))).all()
    root = rt.size - 1
    for tensor in (strided.t(), torch.full((5,), rt.rank, dtype=torch.float8_e4m3fn), torch.ones(())):
        tensor.copy_(torch.tensor(1.0 + (rt.rank == root)))
        dist.broadcast(tensor, root)
        assert tensor.float().eq(2).all()
    dist.destroy_process_group(plain)


def case_what_is_kept_of_small_collectives_is_bounded(rt):
    """Of a program whose tensors have ever new lengths; here each is done as soon as it is called."""
    with mock.patch.object(rt.engine.at_once, "run", lambda *arguments: True):
        for count in range(1, 300):
            dist.all_reduce(torch.ones(count))
    kept = dist.group.WORLD._announcements
    assert 0 < len(kept) <= 256, len(kept)


def case_a_group_can_be_destroyed_and_made_again(rt):
    """What frameworks do between two fits."""
    dist.destroy_process_group()
    dist.init_process_group("mpi4py")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == rt.size


if __name__ == "__main__":
    run_cases(globals())
