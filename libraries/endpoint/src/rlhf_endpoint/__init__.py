"""Serves the policy at an OpenAI-compatible endpoint, for rollouts in which a program calls it."""
