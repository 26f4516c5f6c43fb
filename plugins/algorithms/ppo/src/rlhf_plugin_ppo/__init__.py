"""PPO with a critic and generalised advantage estimation."""
