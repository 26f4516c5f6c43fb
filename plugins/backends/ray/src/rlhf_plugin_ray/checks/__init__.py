"""Checks of ``rlhf doctor`` about Ray: its installation, and the nodes of a cluster."""
