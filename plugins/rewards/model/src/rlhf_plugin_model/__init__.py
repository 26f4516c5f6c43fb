"""Reward: a sequence-classification reward model."""
