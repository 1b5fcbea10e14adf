"""The layer as modules, its parallel styles and its metrics."""
