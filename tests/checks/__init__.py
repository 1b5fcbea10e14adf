"""Commands of the Makefile that run several checks."""
