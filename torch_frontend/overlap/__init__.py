"""Exchanges that run while experts compute."""
