"""A job in virtual time: the same strategies and roles as over MPI, in one process."""
