"""Reward: verifies mathematical answers."""
