"""A descriptor for attributes that are assigned once, during construction."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Fixed(Generic[T]):
    """A read-only attribute, for sizes that determined how many rows were allocated.

    >>> class Row:
    ...     width = Fixed[int]()
    >>> row = Row()
    >>> row.width = 3
    >>> row.width
    3
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Fixed[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        try:
            return instance.__dict__[f"_fixed_{self._name}"]
        except KeyError:
            raise AttributeError(f"{owner.__name__} has no {self._name} yet") from None

    def __set__(self, instance: object, value: T) -> None:
        key = f"_fixed_{self._name}"
        if key in instance.__dict__:
            name = type(instance).__name__
            raise AttributeError(
                f"{self._name} of this {name} is {instance.__dict__[key]!r} for good, because its "
                f"rows were allocated by it: build another {name} instead of assigning {value!r}"
            )
        instance.__dict__[key] = value
