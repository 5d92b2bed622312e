"""`python -m mpitrain`: what `mpitrain launch` starts, for it needs no script on the PATH of every host."""

import faulthandler
import signal
import sys

if sys.argv[1:2] == ["train"] and "--dry-run" not in sys.argv:  # as `main` does, before anything is imported
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP))
    if sys.stderr is not None:
        faulthandler.register(signal.SIGQUIT, file=2)

from mpitrain.cli.main import main

sys.exit(main())
