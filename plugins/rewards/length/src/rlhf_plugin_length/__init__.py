"""Reward: prefers answers within a length."""
