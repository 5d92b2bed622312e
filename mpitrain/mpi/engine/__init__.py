"""Nonblocking operations, and the one thread at a time that drives them."""
