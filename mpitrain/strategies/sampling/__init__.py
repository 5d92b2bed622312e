"""Who is given which samples: leases, step partitions and peer partitions."""
