"""Times and energy of steps, on one GPU and on the ranks of a host."""
