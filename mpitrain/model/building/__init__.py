"""How a module is made: without its large tensors, cut into stages, compiled."""
