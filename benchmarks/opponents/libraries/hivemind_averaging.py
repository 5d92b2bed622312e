"""hivemind: its TrainingAverager of parameters, called after every period; a peer each, which find each other by its
DHT. A group is complete once all are in it, so nobody waits for the time that matchmaking may take."""

import hivemind
from measuring.beside import answer_with, settings
from rounds import Meeting, Worker, answer_for

if __name__ == "__main__":
    told, meeting = settings(), Meeting()
    worker = Worker(told["model"], meeting.rank)
    place = ["/ip4/127.0.0.1/tcp/0"]
    first = hivemind.DHT(start=True, host_maddrs=place) if meeting.rank == 0 else None
    peer = meeting.told(first and str(first.get_visible_maddrs()[0]))
    dht = first or hivemind.DHT(start=True, host_maddrs=place, initial_peers=[peer])
    averager = hivemind.optim.training_averager.TrainingAverager(
        worker.optimizer, average_parameters=True, average_gradients=False, dht=dht, prefix="model", start=True,
        target_group_size=meeting.size, min_group_size=meeting.size, min_matchmaking_time=2.0, request_timeout=1.0,
    )  # fmt: skip

    def average():
        if worker.num_steps % told["period"] == 0:
            gathered = averager.step(allow_retries=True)
            assert gathered is not None and len(gathered) == meeting.size, "all have averaged"

    answer_with(answer_for(worker, meeting, average))
    averager.shutdown()
    dht.shutdown()
