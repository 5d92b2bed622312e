"""A command that a signal meets while it reads its arguments: the signal's name, and its arguments."""

import os
import signal
import sys

from mpitrain.cli import main as cli

parse = cli.parse


def parse_signalled(argv):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return parse(argv)


cli.parse = parse_signalled
sys.exit(cli.main(sys.argv[2:]))
