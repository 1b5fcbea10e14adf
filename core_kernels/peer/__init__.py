"""Rows between the GPUs of one host, through memory that all of them map."""
