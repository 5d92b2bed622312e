"""What ends a run that stands still: alarms, stacks and emergency checkpoints."""
