"""Rewards: how they are called, and their access to the run's models."""
