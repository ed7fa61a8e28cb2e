"""The text that this project grew from, measured: one file a part of it, one experiment a statement."""
