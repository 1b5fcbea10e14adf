"""Measured code: shapes, inputs, and the check that runs before the clock."""
