"""What stands where a launcher has started a rank: asks the pool's server for a warm process, and ends as it does.

It passes on everything a rank has from its launcher (arguments, environment, working directory, open files, signals
that are held back or ignored, limits, cores, host name) and every signal it is sent. When it is killed, the server sees
its connection close and kills the rank. Where the server cannot fork, it becomes the program itself, as the launcher
would have started it. Run by `python -I -S`, which takes some hundredths of a second, or from `at_start/`; stdlib only.
"""

import json
import os
import resource
import signal
import socket
import sys

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_KEPT = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE}
FORWARDED = signal.valid_signals() - _KEPT


def main(address: str, folder: str, argv: list[str]) -> None:
    ask(address, folder, argv)
    os.execv(sys.executable, [sys.executable, *argv])


def ask(address: str, folder: str, argv: list[str]) -> None:
    """Run `python *argv` in a warm process, and end with it; returns if the server cannot."""
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    ignored = [int(number) for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "argv": argv,
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "files": files,
        "mask": [int(number) for number in mask],
        "ignored": ignored,
        "limits": [[number, *resource.getrlimit(number)] for number in _LIMITS],
        "umask": umask,
        "cores": sorted(os.sched_getaffinity(0)),
        "folder": folder,
    }
    text = json.dumps(request).encode()
    answers = server.makefile("r")
    first = ""
    try:
        socket.send_fds(server, [len(text).to_bytes(8, "big")], files)
        server.sendall(text)
        first = answers.readline()
    except ConnectionError:
        pass
    if not first:  # the server could not fork
        for kept in (server, answers):
            kept.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    rank = int(first)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: _forward(rank, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = int(answers.readline() or _lost())
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ended_by = os.WTERMSIG(status)
        if ended_by != signal.SIGKILL:
            signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    os._exit(os.waitstatus_to_exitcode(status))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the listing's own
        return False
    return True


def _forward(rank: int, number: int) -> None:
    try:
        os.kill(rank, number)
    except ProcessLookupError:
        pass


def _lost() -> str:
    os.write(2, b"the server of the rank pool has ended\n")
    os._exit(70)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
