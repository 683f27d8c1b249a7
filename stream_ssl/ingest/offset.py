"""Where a consumer stands in the journal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Offset:
    """The next sample to read: `sample` counts from 0 within journal record `record`, from 1.

    Raises:
        ValueError: a number below these.
    """

    record: int
    sample: int

    def __post_init__(self) -> None:
        if self.record < 1 or self.sample < 0:
            raise ValueError(
                f"offset ({self.record}, {self.sample}): records count from 1, samples from 0; "
                "the journal begins at (1, 0)"
            )


START = Offset(1, 0)
