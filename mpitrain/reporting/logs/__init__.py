"""Logs that other programs read."""
