"""Agents: programs whose calls of a model are recorded through a gateway, and the boxes in which they run."""
