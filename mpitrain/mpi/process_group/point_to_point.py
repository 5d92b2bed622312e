"""Messages between two ranks of the process group, and its barriers.

Invariants: a receiver knows what it will get before its memory is touched. A message is a head, with dtype and length,
that holds all of a short message; of a longer one a body follows, which the receiver asks for only when the head fits:
Open MPI 5.0.11 crashes when a long message is longer than its receive. What does not fit is received aside and is an
error where it is received.
"""

import functools
import struct
import warnings
from datetime import timedelta
from typing import Any

import torch

from mpitrain.devices import accelerator
from mpitrain.errors import MismatchError, MonitoredBarrierError
from mpitrain.mpi.bindings import MPI
from mpitrain.mpi.engine.collective_queue import Task, digest, last_tag
from mpitrain.mpi.memory import buffers
from mpitrain.mpi.operation import Op
from mpitrain.mpi.process_group import profiled
from mpitrain.mpi.process_group.base import (
    MOST_COPIES,
    Call,
    GroupBase,
    as_list,
    check_writable,
    in_inference_mode,
    shape_of,
)
from mpitrain.mpi.process_group.work import MpiWork
from mpitrain.system import trace
from mpitrain.torch_versions import warm_up_fault

_HEAD = struct.Struct("<QQQQ")  # digest(dtype), elements, bytes, number of the body
_WAITS = 1 << 32  # added to the number by a sender that waits until its message has come
_INLINE_BYTES = 65536  # a second message costs more than a longer first one
_COPIED_BYTES = 1 << 19  # are sent from a copy: where ranks share cores, a wait for the receiver costs more
_QUICK_BYTES = 1 << 20  # done sooner than another thread is woken
_ANY = "receive from any rank"
_BODY_TAG = 16384  # bodies are numbered above it; the algorithms' tags lie below


class PointToPoint(GroupBase):
    """send, recv, recv from any source, barrier, monitored barrier."""

    def send(self, tensors: Any, dst: int, tag: int = 0) -> MpiWork:
        """Send one tensor to rank `dst` of this group."""
        (tensor,) = as_list(tensors)
        _check_tag(tag)
        if self._goes_plainly(tensor):
            return self._send_plain(tensor, dst, tag)
        event = buffers.record_event(tensor)

        def carry() -> Task:
            held = buffers.lease(tensor, reads=True, writes=False, after=event, on_host=True)
            raw = (
                held.memory.view(-1).view(torch.uint8)
                if tensor.numel()
                else torch.empty(0, dtype=torch.uint8)
            )
            number, limit_s = self._next_body(), self._timeout_s()
            head = _HEAD.pack(_digest_of(tensor.dtype), tensor.numel(), raw.numel(), number | _WAITS)
            if raw.numel() <= _INLINE_BYTES:
                yield [
                    self._engine.isend(head + raw.numpy().tobytes(), dst, tag, self._control_comm, limit_s)
                ]
            else:
                bodies = [buffers.message_of(piece) for piece in buffers.pieces(raw)]
                yield [
                    self._engine.isend(head, dst, tag, self._control_comm, limit_s),
                    *[
                        self._engine.isend(one, dst, _BODY_TAG + number, self._comm, limit_s)
                        for one in bodies
                    ],
                ]
            held.finish()

        return self._transfer(f"send to {dst}", tensor, carry)

    def _next_body(self) -> int:
        """A number that no other body under way to the same rank has."""
        return next(self._bodies) % _BODY_TAG

    def _goes_plainly(self, tensor: torch.Tensor) -> bool:
        """Whether MPI can read and write a tensor in one piece as it is, and nobody looks at single transfers."""
        return buffers.is_plain(tensor) and tensor.nbytes <= buffers.MAX_COUNT and self._may_run_at_once()

    def _send_plain(self, tensor: torch.Tensor, dst: int, tag: int) -> MpiWork:
        """`send` without the machinery, which costs more than most messages themselves."""
        num_bytes, raw = tensor.nbytes, buffers.bytes_of_plain(tensor)
        number = 0 if (is_short := num_bytes <= _INLINE_BYTES) else self._next_body()
        goes_on = num_bytes <= _COPIED_BYTES and self._may_go_on()
        head = _HEAD.pack(
            _digest_of(tensor.dtype), tensor.numel(), num_bytes, number if goes_on else number | _WAITS
        )
        if is_short:
            op = self._post_send(head + raw.tobytes(), dst, tag, self._control_comm)
        else:
            before = self._post_send(head, dst, tag, self._control_comm)
            body = raw.tobytes() if goes_on else buffers.message_of_plain(tensor)
            op = self._post_send(body, dst, tag, self._comm, _BODY_TAG + number)
        if op.error is None and (op.done or goes_on):
            if not op.done:
                self._copies.append(op)
                op.then(self._has_gone)
            return self._remember(self._done_work)
        work = self._transfer_work(f"send to {dst}", tensor)

        def settle(first: Op) -> None:
            if first.error is None and first is not op:
                op.then(work.settle)
            else:
                work.settle(first)

        (op if is_short else before).then(settle)
        return self._remember(work)

    def _may_go_on(self) -> bool:
        """Whether the caller need not wait for a send of a copy of its tensor, as few are under way."""
        copies = self._copies
        return len(copies) < MOST_COPIES or copies[0].done

    def _has_gone(self, op: Op) -> None:
        op.buffer = None
        if op.error is not None:
            self._fail_transfer(op.error)

    def _post_send(
        self, message: Any, dst: int, tag: int, comm: "MPI.Comm", sent_tag: int | None = None
    ) -> Op:
        """`sent_tag`: where the message does not travel under the caller's."""
        op, on_wire = Op("send", message, dst, tag), tag if sent_tag is None else sent_tag
        op.comm = comm
        return self._engine.post(op, comm.Isend, (message, dst, on_wire), self._timeout_s(), short=True)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> MpiWork:
        """Receive one tensor from rank `src` of this group; MismatchError if another dtype or length comes."""
        return self._recv(tensors, src, tag, f"receive from {src}")

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MpiWork:
        """Receive one tensor from any rank; the Work's `_source_rank()` is the rank that has sent it."""
        if self._runtime.may_miss_from_any and "ucx" in MPI.Get_library_version():
            warnings.warn(
                "recv(src=None): MPICH over UCX may leave a message to any source lying where ranks are on several"
                " nodes; name the rank, or set MPIR_CVAR_CH4_NETMOD=ofi before the launch",
                stacklevel=3,
            )
        return self._recv(tensors, MPI.ANY_SOURCE, tag, _ANY)

    def _recv(self, tensors: Any, source: int, tag: int, what: str) -> MpiWork:
        (tensor,) = as_list(tensors)
        _check_tag(tag)
        if self._goes_plainly(tensor):
            return self._receive_plain(tensor, source, tag, what)
        check_writable(what, tensor)
        event = buffers.record_event(tensor)

        def carry() -> Task:
            op = self._receive_head(source, tag, what)
            yield (op,)
            return (yield from self._take_in(op, tensor, event))

        return self._transfer(what, tensor, carry)

    def _receive_plain(self, tensor: torch.Tensor, source: int, tag: int, what: str) -> MpiWork:
        """`_recv` without the machinery."""
        work = self._transfer_work(what, tensor)

        def arrived(op: Op) -> None:
            if op.error is not None:
                work.settle(op)
                return
            work.source, size = op.source, tensor.nbytes
            if not _fits(op.buffer, tensor):  # an error to come
                rest = self._engine.call(lambda: in_inference_mode(self._take_in(op, tensor, None)))
                rest.then(work.settle)
                return
            number = _HEAD.unpack_from(op.buffer)[3]
            if size > _INLINE_BYTES:
                self._receive_body(buffers.message_of_plain(tensor), op.source, number).then(work.settle)
            else:
                buffers.bytes_of_plain(tensor)[:] = memoryview(op.buffer)[_HEAD.size : _HEAD.size + size]
                if number & _WAITS:
                    self._engine.acknowledge(op)
                work.settle(op)
            self._heads.append(op.buffer)

        self._receive_head(source, tag, what, short=True).then(arrived)
        return self._remember(work)

    def _receive_head(self, source: int, tag: int, what: str, short: bool = False) -> Op:
        try:
            head = self._heads.pop()
        except IndexError:
            head = bytearray(_HEAD.size + _INLINE_BYTES)
        op = Op("receive", head, source, tag, passive=True)
        op.what, op.acknowledges = what, False
        op.comm = comm = self._control_comm
        return self._engine.post(op, comm.Irecv, (head, source, tag), self._timeout_s(), short)

    def _take_in(self, op: Op, tensor: torch.Tensor, event: Any) -> Task:
        """What follows the head that `op` has received; returns the rank that has sent it."""
        dtype_digest, num_elements, num_bytes, number = _HEAD.unpack_from(op.buffer)
        if number & _WAITS:
            self._engine.acknowledge(op)
        fits = _fits(op.buffer, tensor)
        # where it does not fit, the sender has to get rid of it yet
        target = tensor if fits else torch.empty(num_bytes, dtype=torch.uint8)
        held = buffers.lease(target, reads=False, writes=True, after=event if fits else None, on_host=True)
        yield self._receive_rest(op.buffer, held.memory, num_bytes, op.source, number)
        held.finish()
        if not fits:
            raise MismatchError(
                f"rank {op.source} sent {num_elements} elements of"
                f" {_name(dtype_digest)} with tag {op.tag}, rank {self.rank()} receives into {shape_of([tensor])}"
                f"{warm_up_fault() if num_elements == tensor.numel() == 1 else ''}"
            )
        return op.source

    def _receive_rest(
        self, head: bytearray, memory: torch.Tensor, num_bytes: int, source: int, number: int
    ) -> list[Op]:
        """Take a short message out of its head into memory, or post the receives of the body."""
        if not num_bytes:
            return []
        raw = memory.view(-1).view(torch.uint8)
        if num_bytes <= _INLINE_BYTES:
            raw[:] = torch.frombuffer(head, dtype=torch.uint8)[_HEAD.size :][:num_bytes]
            return []
        bodies = [buffers.message_of(piece) for piece in buffers.pieces(raw)]
        return [self._receive_body(body, source, number) for body in bodies]

    def _receive_body(self, message: Any, source: int, number: int) -> Op:
        tag = _BODY_TAG + number % _WAITS
        op = self._engine.irecv(message, source, tag, self._comm, timeout_s=self._timeout_s())
        op.acknowledges = bool(number & _WAITS)
        return op

    def _transfer_work(self, what: str, tensor: torch.Tensor, span: object = None) -> MpiWork:
        return MpiWork(self._engine, what, [tensor], self._timeout, span, self._fail_transfer)

    def _transfer(self, what: str, tensor: torch.Tensor, carry: Any) -> MpiWork:
        self._check_member(what)
        span = profiled.begin(what if what == _ANY else what.partition(" ")[0], tensor)
        work = self._transfer_work(what, tensor, span)

        def over(op: Op) -> None:
            if op.result is not None:  # a receive: from whom
                work.source = op.result
            work.settle(op)

        op = self._engine.call(
            lambda: in_inference_mode(carry()), short=tensor.numel() * tensor.element_size() <= _QUICK_BYTES
        )
        if (land := trace.flight(what)) is not None:
            op.then(land)
        op.then(over)
        return self._remember(work)

    # ---- barriers

    def barrier(self, opts: object = None) -> MpiWork:
        """Done when all ranks have come here; with a device in the options, when its queued work is done, too."""
        device = getattr(opts, "device", None)
        if device is not None:
            accelerator.wait_for_stream(device)
        return self._collective(Call("barrier"), lambda may_block: _nothing(), [], opts)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that names the ranks that did not arrive, in the words of torch's gloo: rank 0 waits up to
        `timeout` (a number is seconds) for a message of every rank, then releases all.

        Raises:
            MonitoredBarrierError: on rank 0 naming the ranks that are missing (the first, or all with
                `wait_all_ranks`), on the others because rank 0 has not answered.
        """
        self._check_member("monitored_barrier")
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        limit = self._timeout if timeout is None else timeout
        me, limit_s = self.rank(), limit.total_seconds()
        heard = [bytearray(1) for _ in range(self.size())]
        tag = _BODY_TAG - 1

        def report() -> list[Op]:
            peers = range(1, self.size()) if me == 0 else (0,)
            calls = [self._engine.irecv(heard[peer], peer, tag, self._comm) for peer in peers]
            if me:
                self._engine.isend(b"c", 0, tag, self._comm)
            return calls

        calls = self._engine.run(report)
        try:
            self._engine.wait(*calls, timeout_s=limit_s)
        except TimeoutError:
            missing = [op.peer for op in calls if not op.done]
            for op in calls:
                self._engine.cancel(op)
            raise MonitoredBarrierError(_barrier_failure(me, missing, limit, wait_all_ranks)) from None
        if me == 0:
            for peer in range(1, self.size()):
                self._engine.isend(b"g", peer, tag, self._comm)


def _barrier_failure(me: int, missing: list[int], limit: timedelta, wait_all_ranks: bool) -> str:
    """What torch's gloo says, and scripts look for."""
    limit_ms = round(limit.total_seconds() * 1000)
    if me:
        return (
            f"[Rank {me}]: Rank {me} successfully reached monitoredBarrier, but received errors while waiting for"
            f" send/recv from rank 0: it timed out after {limit_ms} ms. Rank 0 names the ranks that did not come."
        )
    if not limit_ms and not wait_all_ranks:
        return "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms: it may not wait for any rank"
    ranks = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
    return f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {limit_ms} ms: it timed out"


def _nothing() -> Task:
    return
    yield ()


@functools.cache
def _digest_of(dtype: torch.dtype) -> int:
    return digest(str(dtype))


def _fits(head: bytearray, tensor: torch.Tensor) -> bool:
    """Whether the message with this head is what a tensor can hold."""
    dtype_digest, num_elements, _, _ = _HEAD.unpack_from(head)
    return bool(dtype_digest == _digest_of(tensor.dtype) and num_elements == tensor.numel())


_NAMES = {digest(str(dtype)): str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _name(dtype_digest: int) -> str:
    return _NAMES.get(dtype_digest, "an unknown dtype")


def _check_tag(tag: int) -> None:
    if not 0 <= tag < last_tag():
        raise ValueError(f"tag {tag}: this MPI allows 0 to {last_tag() - 1}")
