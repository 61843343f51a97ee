"""Shipped environment (being written)."""
