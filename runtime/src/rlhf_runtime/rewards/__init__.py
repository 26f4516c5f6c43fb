"""Rewards: how they are called, and the models that they read."""
