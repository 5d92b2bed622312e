"""Ranks, replicas and codecs that share one process in virtual time."""
