"""A worker that reads late, where ranks are threads: what it is sent is held as it was until then."""

from mpitrain.effects import Break, Now, Recv
from mpitrain.messages import Reply
from mpitrain.threads.hub import Hub
from mpitrain.threads.world import ThreadWorld
from tests.messages import Bytes

LATE_S = 0.05


class Held(Bytes):
    released = False

    def release(self):
        self.released = True


def reads(late_s, payload):
    if late_s:
        yield Break("slow_reader", late_s)
    began_s = yield Now()
    _, reply = yield Recv()
    assert reply.payload is payload and not payload.released
    return (yield Now()) - began_s


def test_each_message_is_read_so_much_later():
    hub = Hub(2)
    took_s = []
    for late_s in (LATE_S, 2 * LATE_S):
        payload = Held(8)
        hub.inboxes[1].put((0, Reply(0, 0, payload=payload)))
        took_s.append(ThreadWorld(hub, 1).run(reads(late_s, payload)))
    assert took_s[0] >= LATE_S and took_s[1] >= 2 * LATE_S
