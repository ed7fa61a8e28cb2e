"""All fourteen statements, in the order of the text, and the trainings that some of them need."""

from analysis.derivation import ablations, cost, mask, multihead, projections, scale, sinks

PARTS = (projections, scale, mask, multihead, sinks, cost)
STATEMENTS = sorted(
    (statement for part in PARTS for statement in part.EXPERIMENTS), key=lambda statement: statement.number
)
TRAININGS = {  # by statement, the names of their configs in configs/ablations/
    1: ablations.DIRECTIONS,
    2: ablations.VALUES,
    5: [*ablations.NORMED, *ablations.UNNORMED],
    11: [sinks.NONE, *sinks.ELSEWHERE],
    14: ablations.GROUPS,
}
