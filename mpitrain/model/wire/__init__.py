"""The model as a flat vector, and what of it travels: buffers, codecs of pushes and replies."""
