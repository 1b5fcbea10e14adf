"""The baselines of measurements."""
