"""The network. Knows nothing of data, training or analysis.

Tensors carry their shape as a suffix: `q_BHTD`, `logits_BTV`.

| letter | axis                   | letter | axis                     |
|--------|------------------------|--------|--------------------------|
| B      | sequences of a batch   | D      | width of a head          |
| T      | query positions        | C      | width of the model       |
| S      | key positions, S >= T  | V      | vocabulary               |
| H      | query heads            | L      | layers                   |
| G      | key and value heads    |        |                          |
"""
