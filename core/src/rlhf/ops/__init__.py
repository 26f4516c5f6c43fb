"""Pure tensor functions: batches, groups, returns, KL, ratios, reductions, heads, the credit pipeline."""
