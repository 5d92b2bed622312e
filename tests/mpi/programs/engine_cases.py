"""The progress engine on real ranks: the same cases inline and with the communication thread."""

import functools
import gc
import itertools
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mpitrain.effects import Break, Now, Recv, Send
from mpitrain.messages import Join, Push, Reply, payload_of
from mpitrain.model.wire.buffers import FixedBuffer
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.collective_queue import CollectiveQueue
from mpitrain.mpi.engine.engine import Engine
from mpitrain.mpi.engine.requests import Progress
from mpitrain.mpi.world import MpiWorld
from tests.mpi.cases import raises, run_cases

SIZES = (
    0,
    1,
    1000,
    70_000,
    1_000_003,
    20_000_000,
)  # eager and rendezvous, odd, and larger than a pipeline's depth
DEADLINE_S = 30.0


def pattern(size, *key):
    """Bytes that no other message has."""
    return np.random.default_rng([size, *key]).integers(0, 256, size, dtype=np.uint8)


def both_ways(case):
    """Run a case inline, then with the thread, where ranks ring each other and where they do not; each with an engine
    of its own."""

    def run(rt):
        for threaded, rings in itertools.product((False, True), (False, rt.neighbours is not None)):
            engine = Engine(rt.comm)
            if rings:
                engine.use_bell(rt.neighbours, rt.shares_cores)
            if threaded:
                engine.start_thread()
            rt.step = int(threaded)
            case(rt, engine)
            engine.stop(DEADLINE_S)
            assert not engine.outstanding
            rt.barrier()

    return run


@both_ways
def case_ring_of_all_sizes(rt, engine):
    """Everybody sends to the next and receives from the one before, all sizes at once; receives posted first."""
    after, before = (rt.rank + 1) % rt.size, (rt.rank - 1) % rt.size
    inbox = {size: np.zeros(size, np.uint8) for size in SIZES}
    receives = [engine.irecv(inbox[size], before, tag) for tag, size in enumerate(SIZES)]
    sends = [engine.isend(pattern(size, rt.rank), after, tag) for tag, size in enumerate(SIZES)]
    engine.wait(*receives, *sends, timeout_s=DEADLINE_S)
    for op, size in zip(receives, SIZES):
        assert op.done and op.error is None and op.status_bytes == size and op.source == before
        assert np.array_equal(inbox[size], pattern(size, before)), size


@both_ways
def case_who_posts_a_message_rings_a_rank_that_waits_for_it(rt, engine):
    """Named or not, and only one that waits; a deadline ends the wait where nobody rings."""
    if not engine._rests.bell or rt.rank > 1:
        return
    bell, (other,) = rt.neighbours.bell, rt.neighbours.among([1 - rt.rank]).words()
    num_rings, data = 0, bytearray(1000)
    for turn in range(30):
        rung = bell.num_rung
        if rt.rank == 0:
            while not other.words[48]:
                pass
            engine.wait(engine.isend(data, 1, turn), timeout_s=DEADLINE_S)
            num_rings += bell.num_rung > rung
            engine.wait(engine.irecv(data, 1, turn), timeout_s=DEADLINE_S)
        else:
            source = MPI.ANY_SOURCE if turn % 2 else 0
            engine.wait(engine.irecv(data, source, turn, passive=True), timeout_s=DEADLINE_S)
            assert not bell.wanted or engine._thread, "peers ring in vain"
            engine.wait(engine.isend(data, 0, turn), timeout_s=DEADLINE_S)
    assert rt.rank or num_rings > 15, num_rings
    if rt.rank == 1:
        op = engine.irecv(data, 0, 99, passive=True)
        raises(TimeoutError, "receive from rank 0, tag 99", lambda: engine.wait(op, timeout_s=0.05))
        engine.cancel(op)


def case_another_thread_may_ask_while_groups_come_and_go(rt):
    """The watchdog asks whether this rank waits for others while the main thread makes and ends groups."""
    progress, over, failures = Progress(lambda: None), threading.Event(), []

    def ask():
        try:
            while not over.is_set():
                assert progress.num_arriving == 0 and len(progress) == 0 and progress.is_idle
        except BaseException as failure:  # an assertion, or a dict that changed its size
            failures.append(failure)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=ask)
    try:
        sys.setswitchinterval(1e-6)
        thread.start()
        comms: list[Any] = [SimpleNamespace(handle=number, size=1) for number in range(200)]
        for _ in range(40):
            for control_comm in comms:
                progress._queues[control_comm.handle] = CollectiveQueue(control_comm)
            for control_comm in comms:
                progress.forget([control_comm])
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures, failures


@both_ways
def case_what_may_never_be_done_keeps_nobody_awake(rt, engine):
    """A long message to a rank that does not take it is asked for as seldom as a passive receive, and done when it
    does."""
    after, before = (rt.rank + 1) % rt.size, (rt.rank - 1) % rt.size
    size = SIZES[-1]
    send, receive = engine.isend(pattern(size, rt.rank), after, 1), engine.irecv(bytearray(1), before, 2)
    for peer in {after, before}:
        engine.make_passive(peer)
    engine.run(lambda: None)  # what was handed to another thread is done
    assert engine._progress.num_awake == 0
    assert (
        not receive.done
    )  # of the send that is not sure: Intel MPI takes a message in that nobody has asked for
    # What a faster rank sends next would complete this rank's receive. `rt.barrier()` would poll beside the thread.
    engine.run(lambda: None, rt._control_comm)
    engine.wait(engine.isend(bytearray(1), after, 2), receive, timeout_s=DEADLINE_S)
    inbox = np.zeros(size, np.uint8)
    engine.wait(engine.irecv(inbox, before, 1), send, timeout_s=DEADLINE_S)
    assert np.array_equal(inbox, pattern(size, before))


@both_ways
def case_short_message_tells_its_length(rt, engine):
    """A message shorter than the buffer is told by status_bytes; what lay behind it is untouched."""
    if rt.rank == 0:
        engine.wait(engine.isend(b"abc", 1, 5), timeout_s=DEADLINE_S)
    if rt.rank == 1:
        buffer = bytearray(b"........")
        op = engine.irecv(buffer, 0, 5)
        engine.wait(op, timeout_s=DEADLINE_S)
        assert (op.status_bytes, bytes(buffer)) == (3, b"abc.....")


@both_ways
def case_callbacks_run_once_in_the_polling_thread(rt, engine):
    """`then` before and after completion; callbacks may post more (here: an echo of an echo)."""
    peer = rt.rank ^ 1
    if peer >= rt.size:
        return
    calls, inbox, second = [], bytearray(1), bytearray(1)
    later = []

    def on_first(op):
        calls.append(threading.current_thread().name)
        later.append(engine.isend(bytes(inbox), peer, 8))
        later.append(engine.irecv(second, peer, 8))

    engine.irecv(inbox, peer, 7).then(on_first)
    first = engine.isend(bytes([rt.rank]), peer, 7)
    engine.wait(first, timeout_s=DEADLINE_S)
    engine.wait_any(lambda: len(later) == 2 and all(op.done for op in later), DEADLINE_S)
    drivers = {"MainThread"} if engine.owns_mpi else {"MainThread", "mpitrain-communication"}
    assert len(calls) == 1 and set(calls) <= drivers
    assert (inbox[0], second[0]) == (peer, rt.rank)
    first.then(lambda op: calls.append("late"))
    assert len(calls) == 2 and calls[1] == "late"


@both_ways
def case_many_outstanding_complete_each_once(rt, engine):
    """A hundred small messages from every peer, posted in one order and received in another."""
    peers = [rank for rank in range(rt.size) if rank != rt.rank]
    inbox = {(peer, tag): np.zeros(1, np.int64) for peer in peers for tag in range(100)}
    done = []
    receives = [
        engine.irecv(inbox[key], *key).then(lambda op: done.append((op.peer, op.tag))) for key in inbox
    ]
    sends = [
        engine.isend(np.array([rt.rank * 1000 + tag]), peer, tag)
        for peer in peers
        for tag in reversed(range(100))
    ]
    engine.wait(*receives, *sends, timeout_s=DEADLINE_S)
    assert sorted(done) == sorted(inbox)
    assert all(int(inbox[peer, tag][0]) == peer * 1000 + tag for peer, tag in inbox)


@both_ways
def case_cancelled_receive_completes_and_consumes_nothing(rt, engine):
    """A withdrawn receive raises CancelledError where it is waited for, and the message goes to the next one."""
    peer = (rt.rank + 1) % rt.size
    other = (rt.rank - 1) % rt.size
    buffer, unused = bytearray(4), bytearray(4)
    op = engine.irecv(unused, peer, 9, passive=True)
    engine.cancel(op)
    try:
        engine.wait(op, timeout_s=DEADLINE_S)
    except CancelledError as error:
        assert op.cancelled and f"rank {peer}" in str(error)
    else:
        raise AssertionError("wait returned for a withdrawn receive")
    engine.run(rt.comm.Barrier)
    sent = engine.isend(b"kept", other, 9)
    op = engine.irecv(buffer, peer, 9)
    engine.wait(op, sent, timeout_s=DEADLINE_S)
    assert bytes(buffer) == b"kept" and bytes(unused) == bytes(4)


@both_ways
def case_stop_withdraws_passive_receives(rt, engine):
    """Listening for what never comes does not keep a job from ending."""
    op = engine.irecv(bytearray(8), (rt.rank + 1) % rt.size, 10, passive=True)
    engine.stop(DEADLINE_S)
    assert op.done and op.cancelled


@both_ways
def case_timeout_names_what_is_missing(rt, engine):
    """A deadline that passes raises TimeoutError with rank and tag, and the receive is still good afterwards."""
    buffer, peer = bytearray(1), (rt.rank + 1) % rt.size
    op = engine.irecv(buffer, peer, 11)
    try:
        engine.wait(op, timeout_s=0.05)
    except TimeoutError as error:
        assert f"from rank {peer}, tag 11" in str(error), error
    else:
        raise AssertionError("nothing was sent, yet the wait returned")
    engine.run(rt.comm.Barrier)
    engine.wait(engine.isend(b"x", (rt.rank - 1) % rt.size, 11), op, timeout_s=DEADLINE_S)
    assert buffer == b"x"


@both_ways
def case_errors_reach_the_waiting_and_spare_the_others(rt, engine):
    """A wrong rank and a message that is too long fail their own operation; the engine goes on."""
    wrong = engine.isend(b"", rt.size, 1)
    try:
        engine.wait(wrong, timeout_s=DEADLINE_S)
    except MPI.Exception as error:
        assert error.Get_error_class() == MPI.ERR_RANK
    else:
        raise AssertionError("a send to nobody succeeded")
    peer = rt.rank ^ 1
    if peer < rt.size:
        short, fine = bytearray(2), bytearray(4)
        ops = [engine.irecv(short, peer, 12), engine.irecv(fine, peer, 13)]
        sends = [engine.isend(b"long", peer, 12), engine.isend(b"fine", peer, 13)]
        engine.wait(ops[1], *sends, timeout_s=DEADLINE_S)
        assert bytes(fine) == b"fine"
        try:
            engine.wait(ops[0], timeout_s=DEADLINE_S)
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_TRUNCATE
        else:
            raise AssertionError("a message was cut off silently")
    failed = engine.call(lambda: 1 // 0)
    try:
        engine.wait(failed, timeout_s=DEADLINE_S)
    except ZeroDivisionError:
        assert engine.run(lambda: 42) == 42
    else:
        raise AssertionError("the call's exception was lost")


@both_ways
def case_collective_waits_in_the_engine_not_in_mpi(rt, engine):
    """A rank that waits in a collective still answers messages: the late rank comes only after it has its answer."""
    if rt.rank == rt.size - 1:
        answer = bytearray(1)
        ops = [engine.isend(b"?", 0, 14), engine.irecv(answer, 0, 15)]
        engine.wait(*ops, timeout_s=DEADLINE_S)  # rank 0 is in the collective already, or soon will be
        assert answer == b"!"
    question, replies = bytearray(1), []
    if rt.rank == 0:
        engine.irecv(question, rt.size - 1, 14).then(
            lambda op: replies.append(engine.isend(b"!", rt.size - 1, 15))
        )
    total = np.array([rt.rank + 1.0])
    ops = [engine.collective(lambda: rt.comm.Allreduce(MPI.IN_PLACE, total), rt._control_comm)]
    ops.append(engine.collective(lambda: rt.comm.Allreduce(MPI.IN_PLACE, total), rt._control_comm))
    engine.wait(*ops, timeout_s=DEADLINE_S)
    assert total[0] == rt.size * rt.size * (rt.size + 1) / 2
    engine.wait(*replies, timeout_s=DEADLINE_S)


@both_ways
def case_collectives_keep_the_order_of_submission(rt, engine):
    """Ten collectives submitted at once run in order on every rank; one that fails does not hold up the rest."""
    order, ops = [], []

    def body(k):
        order.append(k)
        if k == 4:
            raise ValueError(f"planted {k}")
        rt.comm.Barrier()
        return k

    for k in range(10):
        ops.append(engine.collective(lambda k=k: body(k), rt._control_comm))
    for k, op in enumerate(ops):
        try:
            engine.wait(op, timeout_s=DEADLINE_S)
            assert op.result == k
        except ValueError as error:
            assert (k, str(error)) == (4, "planted 4")
    assert order == list(range(10))
    assert isinstance(ops[4].error, ValueError)


def case_no_other_engine_calls_mpi_beside_a_communication_thread(rt):
    """Two threads would be inside MPI, where this process is to have one. An idle one calls nothing."""
    engine = Engine(rt.comm)
    engine.start_thread()
    rt.barrier()
    engine.irecv(bytearray(1), (rt.rank + 1) % rt.size, 19, passive=True)
    engine.run(lambda: None)  # what was handed to the thread is done
    raises(AssertionError, "another engine", rt.engine.poll)
    engine.stop(DEADLINE_S)


def case_a_broken_callback_fails_everybody_who_waits(rt):
    """On the thread there is nobody to raise to, so everything outstanding and everything new gets the error. What a
    message may still be written to outlives the engine."""
    engine = Engine(rt.comm)
    engine.start_thread()
    buffer = np.zeros(1, np.uint8)
    never = engine.irecv(buffer, (rt.rank + 1) % rt.size, 16)

    def broken(op):
        raise KeyError("planted in a callback")

    is_heard = threading.Event()  # or what is done already calls back at once, in this thread
    engine.call(is_heard.wait).then(broken)
    is_heard.set()
    for op in (never, engine.call(lambda: None)):
        try:
            engine.wait(op, timeout_s=DEADLINE_S)
        except KeyError as error:
            assert "planted in a callback" in str(error)
        else:
            raise AssertionError("the engine is broken, yet the wait returned")
    engine.stop(DEADLINE_S)
    written = weakref.ref(buffer)
    del engine, never, op, buffer
    gc.collect()
    assert written() is not None
    rt.barrier()
    rt.comm.Send(b"0", (rt.rank - 1) % rt.size, 16)  # what the abandoned receive still takes


def case_inline_callback_errors_reach_the_caller(rt):
    """Inline, a callback's exception comes out of the poll that ran it, and the engine goes on."""
    engine = Engine(rt.comm)
    peer, other, first, second = (rt.rank + 1) % rt.size, (rt.rank - 1) % rt.size, bytearray(1), bytearray(1)
    engine.irecv(first, peer, 17).then(lambda op: 1 // 0)
    good = engine.irecv(second, peer, 18)
    sends = [engine.isend(b"a", other, 17), engine.isend(b"b", other, 18)]
    raised = []
    while not raised:
        try:
            engine.poll()
        except ZeroDivisionError as error:
            raised.append(error)
    engine.wait(good, *sends, timeout_s=DEADLINE_S)
    assert (first, second) == (b"a", b"b") and not engine.outstanding


def case_inline_a_callback_that_fails_in_the_last_look_before_a_sleep_breaks_nothing(rt):
    """Its exception comes out of the wait, as out of any poll, and the engine goes on."""
    if rt.neighbours is None:
        return
    engine = Engine(rt.comm)
    engine.use_bell(rt.neighbours, rt.shares_cores)
    peer, other, first, second = (rt.rank + 1) % rt.size, (rt.rank - 1) % rt.size, bytearray(1), bytearray(1)
    rt.engine.wait(rt.engine.isend(b"a", other, 27), timeout_s=DEADLINE_S)
    engine.irecv(first, peer, 27, passive=True).then(lambda op: 1 // 0)
    good, poll = engine.irecv(second, peer, 28, passive=True), engine.poll
    engine.poll = lambda: poll() if sys._getframe(1).f_code.co_name in ("_has_work", "_step") else 0
    raises(ZeroDivisionError, "", lambda: engine.wait(good, timeout_s=DEADLINE_S))
    del engine.poll
    engine.wait(good, engine.isend(b"b", other, 28), timeout_s=DEADLINE_S)
    assert (first, second) == (b"a", b"b") and not engine.outstanding


def case_any_source_is_refused_where_ranks_may_die(rt):
    """A dead peer cannot be told apart under ANY_SOURCE."""
    try:
        Engine(rt.comm, tolerant=True).irecv(bytearray(1), MPI.ANY_SOURCE, 1)
    except ValueError as error:
        assert "by its number" in str(error)
    else:
        raise AssertionError("accepted")


NUM_ROUNDS = 20


def sender_of(rank):
    """Messages with and without a payload, all on their way at once."""
    for step in range(NUM_ROUNDS):
        yield Send(0, Join(step))
        frame = FixedBuffer(400_000, torch.float32)
        frame.body.fill_(rank * NUM_ROUNDS + step)
        yield Send(0, Push(0, step, 1, frame))


def receiver(heard, num_messages):
    while len(heard) < num_messages:
        source, message = yield Recv()
        payload = payload_of(message)
        number = float(payload.body[-1]) - source * NUM_ROUNDS if isinstance(payload, FixedBuffer) else None
        heard.append((source, type(message), message.step, number))


def case_one_receive_listens_to_all_peers_and_messages_of_each_keep_their_order(rt):
    """Of what a world has outstanding at the beginning nothing grows with the number of peers; in a job that goes on
    without dead ranks every peer has a receive of its own."""
    heard = []
    buffers = lambda source, kind: FixedBuffer(400_000, torch.float32)  # noqa: E731
    peers = tuple(one for one in range(rt.size) if one != rt.rank)
    world = MpiWorld(rt.engine, peers, buffers)
    if rt.rank != 0:
        world.run(sender_of(rt.rank))
    else:
        world.start()
        assert len(rt.engine.outstanding) == 1
        world.run(receiver(heard, (rt.size - 1) * 2 * NUM_ROUNDS))
        for source in range(1, rt.size):
            assert [one[1:] for one in heard if one[0] == source] == [
                row for step in range(NUM_ROUNDS) for row in ((Join, step, None), (Push, step, float(step)))
            ]
    assert not rt.engine.outstanding
    rt.barrier()
    tolerant = MpiWorld(Engine(rt.comm, tolerant=True), peers, buffers)
    tolerant.start()
    assert len(tolerant.engine.outstanding) == rt.size - 1
    tolerant.engine.stop()
    rt.barrier()
    each = MpiWorld(Engine(rt.comm), peers, buffers)
    each.engine.listens_to_each = True
    each.start()
    assert len(each.engine.outstanding) == rt.size - 1
    each.engine.stop()


LATE_S = 0.2


def answers_twice(rank, frame):
    """The same contents as two versions: nothing of an update that nobody had anything for."""
    for version in (1, 2):
        yield Send(rank, Reply(version, 0, payload=frame.hold()))


def reads_late(heard):
    yield Break("slow_reader", LATE_S)
    began_s = yield Now()
    while len(heard) < 2:
        _, reply = yield Recv()
        heard.append((reply.version, float(reply.payload.body[-1])))
        reply.payload.release()
    assert (yield Now()) - began_s >= LATE_S


def case_contents_that_are_under_way_are_sent_again_as_they_are(rt):
    """The stamps of what a slow reader has not received yet are those that its header names."""
    for tolerant in (False, True):  # one receive for all peers, or one for each
        engine, heard = Engine(rt.comm, tolerant=tolerant), []
        frame = FixedBuffer(400_000, torch.float32)
        into = functools.partial(lambda frame, source, kind: frame.hold(), frame)
        if rt.rank == 0:
            frame.body.fill_(7.0)
            MpiWorld(engine, (1,), into).run(answers_twice(1, frame))
            assert frame.users == 1
        elif rt.rank == 1:
            MpiWorld(engine, (0,), into).run(reads_late(heard))
            assert heard == [(1, 7.0), (2, 7.0)]
        engine.stop(DEADLINE_S)
        rt.barrier()


def one_message(rank, step):
    yield Send(rank, Join(step))


def nothing():
    """A role that ends at once."""
    return
    yield


def case_a_world_that_is_over_listens_no_more(rt):
    """A message came for the last receive of a world as its role ended: the next world gets what is sent to it."""
    for tolerant in (False, True):
        engine = Engine(rt.comm, tolerant=tolerant)
        if rt.rank == 1:
            MpiWorld(engine, (0,), lambda source, kind: None).run(one_message(0, 1))
        rt.barrier()  # its message is here
        if rt.rank == 0:
            world = MpiWorld(engine, (1,), lambda source, kind: None)
            world.run(nothing())
            assert not engine.outstanding
        rt.barrier()
        if rt.rank == 1:
            MpiWorld(engine, (0,), lambda source, kind: None).run(one_message(0, 2))
        elif rt.rank == 0:
            heard = []
            MpiWorld(engine, (1,), lambda source, kind: None).run(receiver(heard, 1))
            assert [step for _, _, step, _ in heard] == [2]


if __name__ == "__main__":
    run_cases(globals())
