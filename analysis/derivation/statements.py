"""All fourteen statements, in the order of the text."""

from analysis.derivation import mask, multihead, projections, scale

PARTS = (projections, scale, mask, multihead)
STATEMENTS = sorted(
    (statement for part in PARTS for statement in part.EXPERIMENTS), key=lambda statement: statement.number
)
