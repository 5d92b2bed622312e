"""Eight threads do for the first time what fills a table, or reads Python's syntax; prints what went wrong in them."""

import ast
import gc
import sys
import threading

from mpitrain import one_at_a_time, values

TEXT = "async(servers=2,push_wire=threshold(density=0.1,dense_below=0),reply_wire=eightbit(dense_below=0))"
LITERAL = str([[number, (number, {number: "x"})] for number in range(20)])


def read_text():
    assert "servers=2" in str(values.parse(TEXT, "strategy"))


def read_literal():
    """As NumPy does of each of its files, in somebody else's code."""
    assert len(ast.literal_eval(LITERAL)) == 20


def race(*tasks, times):
    failed = []

    def rank(number):
        try:
            for count in range(times):
                tasks[(number + count) % len(tasks)]()
        except Exception as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(failed), "of 8 threads failed", *failed[:1])


sys.setswitchinterval(1e-6)
gc.callbacks.append(lambda phase, info: sum(range(50)))
gc.set_threshold(20, 5, 5)
race(read_text, times=1)  # the table of values is empty
one_at_a_time.parse_in_turn()
race(read_text, read_literal, times=400)
