"""Recipes, and what both frontends decide alike without a kernel."""
