"""torch's datasets and loaders as sources, and sources made of other sources."""
