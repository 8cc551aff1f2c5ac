"""The exception tree: kinds, codes, texts, and that errors survive pickling between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

import ucm
from ucm import errors

ALL = sorted(
    {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.UcmError)
    },
    key=lambda cls: cls.__name__,
)


def make(cls: type[errors.UcmError]) -> errors.UcmError:
    context = {"path": "/data", "errno": 5}
    if issubclass(cls, errors.TaskError):
        return cls(
            "told", failures={3: errors.BusyError("full", context={"lane": 2})}, context=context
        )
    return cls("told", context=context)


def pickled(error: errors.UcmError, protocol: int) -> errors.UcmError:
    again = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - our own bytes
    assert isinstance(again, errors.UcmError)
    return again


@pytest.mark.parametrize("cls", ALL)
def test_every_error_survives_pickling_and_copying(cls: type[errors.UcmError]) -> None:
    error = make(cls)
    for again in (
        *(pickled(error, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy(error),
        copy.deepcopy(error),
    ):
        assert type(again) is cls
        assert str(again) == str(error)
        assert again.args == error.args
        assert (again.message, again.context, again.kind, again.code) == (
            "told",
            error.context,
            cls.kind,
            cls.code,
        )


def test_a_task_error_keeps_its_failures() -> None:
    again = pickled(make(errors.TaskError), pickle.DEFAULT_PROTOCOL)
    assert isinstance(again, errors.TaskError)
    assert str(again.failures[3]) == "(-50004) full [lane=2]"


@pytest.mark.parametrize("cls", ALL)
def test_the_text_is_code_and_message(cls: type[errors.UcmError]) -> None:
    assert str(make(cls)) == f"({cls.code}) told [path=/data, errno=5]"
    assert isinstance(make(cls), RuntimeError)
    assert isinstance(make(cls), ucm.UcmError)


def test_what_else_they_are() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.UnknownConnectorError, errors.ConfigError)
    assert issubclass(errors.InvalidInputError, ValueError)
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert errors.StoreNotFoundError is errors.NotFoundError
    assert errors.StoreUnhealthyError is errors.UnhealthyError


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (errors.UcmError, -1),
        (errors.InvalidInputError, -50000),
        (errors.StoreIOError, -50002),
        (errors.BusyError, -50004),
        (errors.NotFoundError, -50005),
        (errors.UnsupportedError, -50008),
        (errors.NoSpaceError, -50009),
        (errors.DeadlineError, -50010),
    ],
)
def test_codes_are_those_users_of_the_original_know(cls: type[errors.UcmError], code: int) -> None:
    assert cls.code == code


def test_each_kind_has_one_class_and_tells_whether_to_try_again() -> None:
    assert {kind: cls.kind for kind, cls in errors.BY_KIND.items()} == {
        kind: kind for kind in errors.BY_KIND
    }
    retryable = {kind for kind, cls in errors.BY_KIND.items() if cls.retryable}
    assert retryable == {"busy", "timeout", "io", "no_space", "unhealthy"}
