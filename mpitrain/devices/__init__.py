"""What computes beside the host: devices, their streams, their random numbers."""
