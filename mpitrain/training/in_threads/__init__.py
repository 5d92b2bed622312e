"""Runs whose ranks are threads of one process (`--threads`)."""
