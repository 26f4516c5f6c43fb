"""Commands that use the models and rewards of a run file and train nothing: score, eval, generate."""
