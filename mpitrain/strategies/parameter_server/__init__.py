"""Strategies of a parameter server: which gradients it collects, what stale ones are worth, whom it lets go on."""
