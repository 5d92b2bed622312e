"""The watchdog: it ends a run that makes no progress, with stacks of all ranks and an emergency checkpoint."""
