"""The parts that train.py assembles: optimizers, schedule, evaluation, guards, records, checkpoints."""


class Stopped(Exception):
    """The run cannot go on, and what it has saved is safe. The message says why; exit code 1."""
