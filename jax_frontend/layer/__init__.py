"""The layer as functions, its parameters and its metrics."""
