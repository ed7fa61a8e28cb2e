"""Text in, batches out. Knows nothing of the model."""
