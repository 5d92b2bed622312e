"""Pages for people: runs, sweeps, benchmarks and comparisons as one HTML file each, that needs no network."""
