"""`python -m mpitrain`: what `mpitrain launch` starts, for it needs no script on the PATH of every host."""

import sys

from mpitrain.cli import main

sys.exit(main())
