"""Who is silent for how long, seen from a server and from a worker."""
