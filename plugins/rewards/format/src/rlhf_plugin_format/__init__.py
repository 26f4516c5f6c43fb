"""Reward: a regular expression or a template that the answer must match."""
