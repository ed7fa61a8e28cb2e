"""What the heads do: statistics, probes, labels, the page of a run. Reads models, never trains them."""
