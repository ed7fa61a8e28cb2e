"""All fourteen statements, in the order of the text."""

from analysis.derivation import cost, mask, multihead, projections, scale, sinks

PARTS = (projections, scale, mask, multihead, sinks, cost)
STATEMENTS = sorted(
    (statement for part in PARTS for statement in part.EXPERIMENTS), key=lambda statement: statement.number
)
