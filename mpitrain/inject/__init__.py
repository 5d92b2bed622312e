"""Stragglers and faults you can order: what happens to which worker when, as text that means the same in both worlds.

    --inject "slow(worker=2, factor=5)"  --inject "pause(worker=1, at_step=50, seconds=2)"
    --inject "kill(worker=2, at_step=50)"  --inject "disk_full(at_write=1)"
    --inject "poisson(mtbf_s=15)"

Invariants: injection happens at the effect seam and nowhere else. `Straggler.wrap` passes every effect
of a role through and, after a gradient of its worker, yields a `Sleep` or a `Break`; the role, the strategy and the
server stay as they are. A slow worker sleeps, it does not spin: it must not take a core from the others. Which
gradients are hit is a function of (seed, worker, step), never of timing; faults at a rate are hit by the clock. Off
unless asked for.

    fault                 over MPI                                in virtual time
    kill, segv, raise     the process dies so, and under ULFM     its servers learn that it is lost
    kill_at_end           its servers learn of it
    exit, stop, wedge     code 3 without a word; SIGSTOP; it      it never does anything again
                          never computes again: nobody is informed
    slow_reader           receives of its messages begin late     it is handed each message late
    nan                   its next push says that it is not finite: refused, and the run ends or goes on
    flip                  a bit of it flips where workers must hold the same; refused elsewhere
    torn                  the stamps of its next payload differ: the server that gets it ends the run
    disk_full, corrupt_file    of checkpoints: a run goes on from one before it
    crash                 refused                                 the whole job is started again
    poisson               any of these but crash and kill_at_end, at times that are drawn (`drawn.py`)

`worker` is the worker's index, 0 to N - 1, whatever its rank is; `step` counts its own gradients from 0.
"""

from mpitrain.inject.drawn import Due, Poisson, asks_for, falls_silent, mtbf_of, orders_among
from mpitrain.inject.straggler import Straggler
from mpitrain.inject.values import (
    SILENT,
    AtWorker,
    CorruptFile,
    Crash,
    DiskFull,
    Exit,
    Fault,
    FileFault,
    Flip,
    Injection,
    Kill,
    KillAtEnd,
    Nan,
    Pause,
    Raise,
    Segv,
    Slow,
    SlowReader,
    Stall,
    Stop,
    Torn,
    Wedge,
    check_real,
    check_workers,
    read,
    texts,
)

__all__ = [
    "AtWorker",
    "CorruptFile",
    "Crash",
    "DiskFull",
    "Due",
    "Exit",
    "Fault",
    "FileFault",
    "Flip",
    "Injection",
    "Kill",
    "KillAtEnd",
    "Nan",
    "Pause",
    "Poisson",
    "Raise",
    "SILENT",
    "Segv",
    "Slow",
    "SlowReader",
    "Stall",
    "Stop",
    "Straggler",
    "Torn",
    "Wedge",
    "asks_for",
    "check_real",
    "check_workers",
    "falls_silent",
    "mtbf_of",
    "orders_among",
    "read",
    "texts",
]
