"""Counters of speculative decoding that add, and the rates the field quotes."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class DecodeStats:
    """Counts over rounds. Publishing counts, not rates, keeps definitions from mixing."""

    rounds: int = 0
    proposed: int = 0
    """Draft tokens drawn."""
    verified: int = 0
    """Draft tokens the target judged."""
    accepted: int = 0
    """Draft tokens kept by the judge, also those past a stop that ended the text."""

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        return DecodeStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def committed(self) -> int:
        """Tokens committed: accepted drafts and one bonus or resampled token a round."""
        return self.accepted + self.rounds

    @property
    def accepted_length(self) -> float:
        """tau: tokens committed a round, the bonus included; 0 before the first round."""
        return self.committed / self.rounds if self.rounds else 0.0
