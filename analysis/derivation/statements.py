"""All fourteen statements, in the order of the text."""

from analysis.derivation.finding import Experiment

STATEMENTS: list[Experiment] = sorted([], key=lambda statement: statement.number)
