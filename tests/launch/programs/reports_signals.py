"""Prints the name of every signal it is sent, and ends by none of those."""

import signal


def report(number: int, _: object) -> None:
    print(signal.Signals(number).name, flush=True)


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, report)
print("ready", flush=True)
while True:
    signal.pause()
