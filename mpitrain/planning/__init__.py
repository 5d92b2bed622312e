"""A run looked at before it is started: who does what, what it needs, what it sends."""
