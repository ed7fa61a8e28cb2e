"""What the heads do: statistics, probes. Reads models, never trains them."""
