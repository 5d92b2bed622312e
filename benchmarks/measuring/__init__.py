"""What benchmarks share: rows, declarations, turns, gloo, models, launches and emulated hosts."""
