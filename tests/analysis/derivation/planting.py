"""Faults planted in our attention, and what an experiment says of them."""

from typing import Any

import pytest

from analysis.derivation.finding import Finding, Given
from model.attention import CausalSelfAttention

GIVEN = Given(find_nonfinite=lambda *_: "")


def plant(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    """Every attention that is built from here on has these attributes; a function is called with it."""
    build = CausalSelfAttention.__init__

    def broken(self: CausalSelfAttention, *arguments: Any) -> None:
        build(self, *arguments)
        for name, value in attributes.items():
            setattr(self, name, value(self) if callable(value) else value)

    monkeypatch.setattr(CausalSelfAttention, "__init__", broken)


def failed(finding: Finding) -> list[str]:
    """What is outside of its bounds, or may be."""
    return [check.what for check in finding.checks if check.holds is not True]
