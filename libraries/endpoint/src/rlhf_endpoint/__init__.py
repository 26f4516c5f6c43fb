"""The policy behind an OpenAI-compatible endpoint, for rollouts in which a program asks it."""
