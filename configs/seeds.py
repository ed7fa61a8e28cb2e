"""Every random stream gets its own seed, derived from `run.seed` and a purpose.

Data, initialisation, dropout, evaluation and probes never share a generator: doing more of one cannot shift
another, and a stream indexed by the step needs no state in the checkpoint.
"""

import hashlib


def seed_for(seed: int, purpose: str, *index: int) -> int:
    """A 63-bit seed that is a pure function of `(seed, purpose, index)`."""
    digest = hashlib.sha256(repr((seed, purpose, *index)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
